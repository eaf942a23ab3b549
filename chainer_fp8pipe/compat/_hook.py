"""Runs a patch around the code of one module when that is imported."""
# Chainer has no more releases, so what it needs on a current stack comes from
# outside.  To edit its files would need the right to write them and be undone
# by the next installation; a changed copy of Chainer would be another
# distribution, which packages that require "chainer" do not ask for; and names
# that are put back on the numpy module for good would lead others' code, which
# asks hasattr(numpy, 'float'), astray.
#
# So a finder stands before all others.  For a module that has a patch it asks
# the others, whatever they are (folders, zip files, editable installations),
# and wraps the loader that it gets.  That puts the real loader back, and then
# calls the patch with the module and with what runs the module's own code:
# some patches act before it, some after.  A script that never imports the
# module pays for none of this.
#
# Whether a patch is needed is tried, not told from version numbers, which say
# little of a stack that others have patched, too.  Whether the module is the
# one that the patch was written for is told from a piece of its source; if
# not, it is left alone, and a warning says so.
import dataclasses
import functools
import importlib.abc
import sys
import threading
import types
import warnings
from collections.abc import Callable

from . import _old_names
from ._absent import ABSENT, explain
from ._old_values import version

CHAINER = '7.8.1'


class CompatWarning(UserWarning):
    """Chainer is not what the patches of this module were written for."""


@dataclasses.dataclass
class ImportPatch:
    """What one module of Chainer needs on a current stack.

    ``apply(module, run)`` calls ``run()`` to execute the module's own code;
    ``expects`` is a piece of that code without which it is not applied.
    """

    module: str
    lines: str
    cause: str
    expects: str
    needed: Callable[[], bool]
    apply: Callable[[types.ModuleType, Callable[[], None]], None]
    state: str = 'not imported'

    def load(self, module, run):
        """Runs the module's own code, patched if it needs to be."""
        if not self.needed():
            run()
            self.state = 'not needed'
        elif self._finds_its_place(module):
            self.apply(module, run)
            self.state = 'applied'
        else:
            warnings.warn(
                f'{self.module} is not the one of Chainer {CHAINER} (no '
                f'{self.expects!r} in it) and is left unpatched: {self.cause}',
                CompatWarning, stacklevel=2)
            run()
            self.state = 'not applied: not the code of Chainer ' + CHAINER

    def _finds_its_place(self, module):
        loader = getattr(module.__spec__, 'loader', None)
        if loader is None or not hasattr(loader, 'get_source'):
            return True
        source = loader.get_source(self.module)
        return source is None or self.expects in source


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and wraps their loader.

    What is absent (:mod:`._absent`) is explained.
    """

    def __init__(self, patches):
        self._patches = patches
        self._asked = set()

    def find_spec(self, fullname, path, target=None):
        # Another finder may ask all finders in turn: do not answer it.
        question = fullname, threading.get_ident()
        if question in self._asked:
            return None
        self._asked.add(question)
        try:
            spec = next(filter(None, (
                finder.find_spec(fullname, path, target)
                for finder in sys.meta_path
                if finder is not self and hasattr(finder, 'find_spec'))), None)
        except RuntimeError as error:
            if fullname != 'mpi4py.MPI':
                raise
            raise ImportError(ABSENT[fullname], name=fullname) from error
        finally:
            self._asked.remove(question)
        if spec is None:
            return explain(fullname, sys._getframe(1))
        if fullname in self._patches:
            spec.loader = _Loader(spec.loader, self._patches[fullname].load)
        elif _old_names.belongs(
                fullname, spec, _importer(sys._getframe(1))):
            spec.loader = _Loader(spec.loader, _old_names.load)
        return spec


def _importer(frame):
    """The globals of the code whose import statement led to a frame."""
    while frame is not None and frame.f_globals.get(
            '__name__', '').partition('.')[0] == 'importlib':
        frame = frame.f_back
    return frame.f_globals if frame else {}


class _Loader(importlib.abc.Loader):
    """The wrapped loader in all but exec_module, before which it leaves."""

    def __init__(self, loader, load):
        self._loader = loader
        self._load = load

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._loader
        self._load(
            module, functools.partial(self._loader.exec_module, module))


def install(patches: dict[str, ImportPatch]) -> None:
    """Patches the modules already imported, and those that will be."""
    if version('chainer') not in (None, CHAINER):
        warnings.warn(
            f'Chainer {version("chainer")} is installed; '
            f'chainer_fp8pipe.compat was written for {CHAINER}',
            CompatWarning, stacklevel=2)
    sys.meta_path.insert(0, _Finder(patches))
    for name, patch in patches.items():
        if name in sys.modules:
            patch.load(sys.modules[name], lambda: None)
