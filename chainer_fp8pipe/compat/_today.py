"""What Chainer's modules take from here since they are mended.

``install-chainer`` adds this file to Chainer's wheel, as ``chainer/_today.py``
(:mod:`chainer_fp8pipe.compat._edits`); so it imports nothing of this package.
"""
import atexit
import functools
import importlib
import importlib.util
import os
import sys
import types
import weakref
from importlib import metadata
from typing import Any

import numpy


class _Late(types.ModuleType):

    def __getattr__(self, name):
        return getattr(importlib.import_module(self.__name__), name)


def late(module: str) -> types.ModuleType:
    """A module that is imported when something of it is used.

    Together they took half of the time of "import chainer", on every rank.
    """
    if importlib.util.find_spec(module.partition('.')[0]) is None:
        raise ImportError(f'No module named {module!r}', name=module)
    return _Late(module)


def __getattr__(name):
    if name.endswith(('_TO_TENSOR_TYPE', '_TYPE_TO_FIELD')):
        return getattr(onnx_mapping(), name)
    raise AttributeError(f'module {__name__!r} has no {name!r}')


@functools.cache
def onnx_mapping() -> types.ModuleType:
    """onnx.mapping until onnx 1.19."""
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
    """Checks requirements against the packages that are installed."""

    def require(self, *requirements: str) -> None:
        """Raises :class:`ResolutionError` if one of them is not met."""
        # Few need it, and it takes as long as a third of NumPy.
        from packaging.requirements import Requirement
        for wanted in map(Requirement, requirements):
            if not wanted.specifier.contains(metadata.version(wanted.name),
                                             prereleases=True):
                raise ResolutionError(str(wanted))


def resource_filename(package: str, name: str) -> str:
    from importlib import resources
    return str(resources.files(package).joinpath(name))


def build_messages(names: dict[str, Any], serialized: bytes) -> None:
    """Fills the names of a module that an old protoc wrote.

    protobuf 4 makes no descriptors one by one, as these modules do; it reads
    the same serialized text whole.
    """
    from google.protobuf import descriptor_pool
    from google.protobuf.internal import builder
    file = names['DESCRIPTOR'] = descriptor_pool.Default().AddSerializedFile(
        serialized)
    builder.BuildMessageAndEnumDescriptors(file, names)
    builder.BuildTopDescriptorsAndMessages(file, names['__name__'], names)


def read_hdf5(dataset: Any) -> Any:
    """An array; what was saved as bytes stays bytes, and h5py 3 reads text so.
    """
    import h5py
    if hasattr(dataset, 'asstr') and h5py.check_string_dtype(
            dataset.dtype) == ('utf-8', None):
        return numpy.asarray(dataset.asstr()[()], object)
    return numpy.asarray(dataset)


# --- iterators

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

    multiprocessing is half gone by then (until 3.12), a stopped daemon thread
    is called alive (3.13), or must not be joined (from 3.14).
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


# --- words

class NoCuPy:
    """Stands in for the module, for which ``xp is cuda.cupy`` asks."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name):
        raise AttributeError(
            f'cupy.{name} needs CuPy, which does not import here '
            f'({self._error}); on a CPU it is numpy.{name}')


def hint(message: str) -> str:
    """What helps where an array has become float64."""
    return '' if not {'float32', 'float64'} <= {
        *message.replace("'", ' ').split()} else (
            '\nHint: since NumPy 2 a number of NumPy, as an element of an '
            'array, times a float32 array is float64: take its int() or '
            'float()')
