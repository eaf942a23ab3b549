"""Every run-time patch of Chainer: each is gone with its last user.

Each module names the file and line of Chainer 7.8.1 that it replaces, and says
what becomes of another package's patch of the same place; rules common to all
are those of :class:`.patching.Patch`.  (:mod:`chainer_fp8pipe.compat` patches
what keeps Chainer from being imported at all.)
"""
