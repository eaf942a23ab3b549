"""What Chainer's modules take from here since they are mended (._edits).

It is in Chainer's wheel, as ``chainer/_today.py``; it imports nothing of ours.
"""
import atexit
import functools
import importlib.util
import os
import sys
import types
import weakref
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy


def asking(name: str, attribute: Callable[[str], Any]) -> types.ModuleType:
    """A module whose attributes a function gives."""
    module = types.ModuleType(name)
    vars(module)['__getattr__'] = attribute
    return module


def late(name: str) -> types.ModuleType:
    """A module that is imported when something of it is used."""
    if importlib.util.find_spec(name.partition('.')[0]) is None:
        raise ImportError(f'No module named {name!r}', name=name)
    return asking(name, lambda attribute: getattr(
        importlib.import_module(name), attribute))


def no_cupy(error: Exception) -> types.ModuleType:
    """Stands in for CuPy, for which ``xp is cuda.cupy`` asks."""
    def missing(name):
        raise AttributeError(
            f'cupy.{name} needs CuPy, which does not import here ({error}); '
            f'on a CPU it is numpy.{name}')
    return asking('cupy', missing)


def hint(message: str) -> str:
    """What helps where an array has become float64."""
    return '' if not {'float32', 'float64'} <= {
        *message.replace("'", ' ').split()} else (
            '\nHint: since NumPy 2 a number of NumPy, as of an array, times '
            'a float32 array is float64: take its int() or float()')


# --- onnx.mapping until onnx 1.19

def __getattr__(name):
    if name.endswith(('_TO_TENSOR_TYPE', '_TYPE_TO_FIELD')):
        return getattr(onnx_mapping(), name)
    raise AttributeError(f'module {__name__!r} has no {name!r}')


@functools.cache
def onnx_mapping() -> types.ModuleType:
    from onnx import helper
    numbers = {dtype: helper.np_dtype_to_tensor_dtype(dtype)
               for dtype in map(numpy.dtype, '?bBhHiIlLqQefdFDO')}
    mapping = types.ModuleType('onnx.mapping')
    vars(mapping).update(
        NP_TYPE_TO_TENSOR_TYPE=numbers,
        TENSOR_TYPE_TO_NP_TYPE={n: dtype for dtype, n in numbers.items()},
        STORAGE_TENSOR_TYPE_TO_FIELD={
            n: helper.tensor_dtype_to_field(n) for n in numbers.values()})
    return mapping


# --- pkg_resources until setuptools 81

ResolutionError = DistributionNotFound = metadata.PackageNotFoundError
get_distribution = metadata.distribution


class WorkingSet:

    def require(self, *requirements):
        # Few need it, and it takes as long as a third of NumPy.
        from packaging.requirements import Requirement
        for wanted in map(Requirement, requirements):
            if not wanted.specifier.contains(metadata.version(wanted.name),
                                             prereleases=True):
                raise ResolutionError(str(wanted))


# --- strings, devices and iterators

class Numbered:
    """A device, which compares as its number of Chainer 5 did."""

    def __lt__(self, number):
        return getattr(getattr(self, 'device', None), 'id', -1) < number

    def __ge__(self, number):
        return not self < number


def read_hdf5(dataset: Any) -> Any:
    """An array; of text where text was saved, which h5py 3 reads as bytes."""
    import h5py
    if h5py.check_string_dtype(dataset.dtype) == ('utf-8', None):
        return numpy.asarray(dataset.asstr()[()], object)
    return numpy.asarray(dataset)


def workers() -> Any:
    """multiprocessing, forking on Linux where nothing is chosen.

    Python 3.14 starts processes by a server, which runs a script again that
    has no ``if __name__ == '__main__'`` and wants data that can be pickled.
    """
    import multiprocessing
    method = multiprocessing.get_start_method(allow_none=True) or (
        'fork' if sys.platform == 'linux' else None)
    return multiprocessing.get_context(method)


def end_with_python(iterator: Any) -> None:
    """Finalizes an iterator when Python ends, if nobody has.

    Later multiprocessing is half gone (until 3.12), or threads cannot end.
    """
    atexit.register(_end, weakref.ref(iterator), os.getpid())


def _end(reference, process):
    iterator = reference()
    if iterator is not None and process == os.getpid():     # no forked child
        iterator.finalize()


def of_state(name: str) -> property:
    """An attribute of an iterator's state."""
    def put(iterator, value):
        iterator._state = iterator._state._replace(**{name: value})
    return property(lambda iterator: getattr(iterator._state, name), put)
