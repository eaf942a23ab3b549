"""Has ``import chainer`` work wherever this package is installed.

``chainer_fp8pipe.pth`` has every Python of the environment import this
module, which therefore imports nothing by itself.  A script that imports
Chainer, ChainerMN or a package named after them first, and a worker that
forkserver or spawn has started, get :mod:`chainer_fp8pipe.compat` before it.
"""
import sys


class _Finder:

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        package = name.partition('.')[0]
        if 'chainer' not in package or package.startswith('chainer_fp8pipe'):
            return None
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)
        import importlib.util

        # pip builds packages, Chainer among them, with this interpreter but
        # without what is installed for it: there is nothing to put in place.
        if not all(map(importlib.util.find_spec,
                       ('chainer_fp8pipe', 'numpy'))):
            return None
        importlib.import_module('chainer_fp8pipe.compat')
        return importlib.util.find_spec(name)


sys.meta_path.insert(0, _Finder)
