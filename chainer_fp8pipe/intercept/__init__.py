"""Every run-time patch of Chainer 7.8.1, gone with its last user (`Patch`).

(:mod:`chainer_fp8pipe.compat` has what Chainer needs to be imported at all.)
"""
