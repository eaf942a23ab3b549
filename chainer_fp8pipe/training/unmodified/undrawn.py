"""Has a script build its model without the values of large parameters.

Each rank of a pipeline runs the script, which builds the whole model.  Where
a parameter's values come from is noted instead: the state of NumPy's
generator, or an entry of a file that ``load_npz`` reads.  ``partition`` has
rank 0 draw or read one parameter after the other, and send it to its stage,
so that no rank ever has the whole.  Whoever looks at a parameter earlier has
its values drawn, on this rank.

Values, and what the generator gives afterwards, are those of one process.
"""
from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy
from chainer.initializers import constant, generate_array, normal, uniform
from chainer.serializers import npz

from ...chains.deferred import (
    DeferredParameter,
    draw,
    place_values_later,
    without_drawing,
)
from ...chains.placeholder import is_placeholder, user_line
from ...intercept.function_calls import Creation, creating, suspended
from ...intercept.patching import Patch
from ...pipeline.randomness import preserved
from ...report.quantities import size

#: Bytes of a parameter that gets its values at once.
_SMALL = 1 << 16
#: Bytes of a model on each rank that the user is told of.
_WORTH_A_WORD = 1 << 26
#: Random numbers that are drawn at a time where none is kept.
_CHUNK = 1 << 16


class Undrawn(Creation):
    """Notes how the values of large parameters are to be made.

    Args:
        is_building: Whether the script still builds its model.

    Attributes:
        first_read: The line that has first looked at values; ''.
    """

    def __init__(self, is_building: Callable[[], bool]) -> None:
        self._is_building = is_building
        self._is_loading = False
        self.first_read = ''

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """A block in which this thread's script makes models.

        In it links do not look at the arrays of their parameters to find
        which have a shape (chainer/link.py, lines 474, 481 and 735).
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(creating(self))
            for name in 'params', 'namedparams', 'count_params':
                stack.enter_context(Patch(chainer.Link, name,
                                          self._without_looking))
            yield

    def _without_looking(self, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_building():
                return original(*args, **kwargs)
            with without_drawing():
                found = original(*args, **kwargs)
                return found if isinstance(found, int) else iter(list(found))
        return call

    # It ends when the model is built, so it is a property; mypy wants the base
    # class's attribute to stay one that can be set.
    @property
    def creates(self) -> bool:      # type: ignore[override]
        return self._is_building()

    def created(self, parameter: chainer.Parameter, shape: Any) -> None:
        if shape is not None:
            parameter.initialize(shape)

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        shape = (tuple(shape) if isinstance(shape, (tuple, list))
                 else (int(shape),))
        initializer = parameter.initializer
        dtype = chainer.get_dtype(getattr(initializer, 'dtype', None))
        if self._is_loading or not (
                self._is_building() and _is_large(parameter, shape, dtype)
                and _can_be_drawn_again(initializer, shape)
                and parameter._initial_device.xp is numpy):
            return False
        state, default = numpy.random.get_state(), chainer.config.dtype
        _draw_and_forget(initializer, shape)

        def drawn(shape: tuple[int, ...]) -> numpy.ndarray:
            with preserved(), suspended(), chainer.using_config(
                    'dtype', default):
                numpy.random.set_state(state)
                return generate_array(initializer, shape, numpy)
        self._place_later(parameter, shape, dtype, drawn)
        return True

    def _place_later(self, parameter: chainer.Parameter,
                     shape: tuple[int, ...], dtype: Any,
                     make: Callable[[tuple[int, ...]], numpy.ndarray]) -> None:
        def make_now(shape: tuple[int, ...]) -> numpy.ndarray:
            if self._is_building() and not self.first_read:
                self.first_read = user_line()
            return make(shape)
        place_values_later(parameter, shape, dtype, make_now)

    @contextlib.contextmanager
    def loading(self, file: Any, obj: chainer.Link) -> Iterator[None]:
        """A block in which ``load_npz`` reads a link's parameters later."""
        if not self._is_building():
            yield
            return
        source = _File(file)
        named = dict(obj.namedparams())
        of: dict[int, list[Any]] = {}
        for parameter in named.values():
            if parameter._data[0] is not None:
                of.setdefault(id(parameter._data[0]), []).append(parameter)
        read: list[tuple[Any, str]] = []

        def noting(original: Callable) -> Callable:
            def call(own: Any, key: str, value: Any) -> Any:
                found = original(
                    own, key, None if is_placeholder(value) else value)
                key = own.path + key.lstrip('/')
                if is_placeholder(value) and found is not None:
                    _check(key, found, value)
                if found is not None:
                    read.extend((one, key) for one in (
                        [named[f'/{key}']] if value is None
                        and f'/{key}' in named else of.get(id(value), ())))
                return value if is_placeholder(value) else found
            return call
        # Who has no shape yet gets it and, for a moment, the values.
        self._is_loading = True
        try:
            with without_drawing(), Patch(npz.NpzDeserializer, '__call__',
                                          noting):
                yield
        finally:
            self._is_loading = False
        for parameter, key in read:
            array = parameter._data[0]
            if (_is_large(parameter, array.shape, array.dtype)
                    and parameter._initial_device.xp is numpy):
                self._place_later(
                    parameter, array.shape, array.dtype,
                    functools.partial(source.read, key, array.dtype))

    def held(self, model: chainer.Link) -> str:
        """What to say of a model that each rank holds before it is cut.

        '' if ranks hold less than half of it, or than 64 MB.
        """
        arrays = [parameter._data[0] for parameter in model.params()]
        sizes = [(array.nbytes, is_placeholder(array)) for array in arrays
                 if array is not None]
        whole = sum(size for size, _ in sizes)
        held = sum(size for size, is_later in sizes if not is_later)
        if held < max(_WORTH_A_WORD, whole / 2):
            return ''
        why = ('the script makes them of arrays or by an initializer of its '
               'own' if not self.first_read else
               f'{self.first_read} is the first to look at them')
        return (f"{size(held)} of the model's {size(whole)} are "
                'on each rank until the model is divided, as '
                f'{why}; afterwards each rank has its part')

    def draw_others(self, model: chainer.Link) -> None:
        """Draws the parameters that are not the model's.

        Its ``forward`` may use them, and in a trace nothing is drawn.
        """
        own = set(map(id, model.params()))
        gc.collect()            # not what nobody has any more
        for one in gc.get_objects():
            if (type(one) is DeferredParameter and id(one) not in own
                    and one._values_from is not None
                    and is_placeholder(one._data[0])):
                draw(one)


class _File:
    """A file of ``save_npz``, which may be removed before it is read."""

    def __init__(self, path: Any) -> None:
        self._path = os.fspath(path)
        # No with block: it is open as long as a parameter may be read.
        self._file = open(path, 'rb')       # noqa: SIM115
        self._written = self._stamp()
        self._lock = threading.Lock()

    def read(self, key: str, dtype: Any, shape: tuple[int, ...]
             ) -> numpy.ndarray:
        if self._stamp() != self._written:
            raise ValueError(
                f'{self._path} has changed since load_npz has been called, '
                'and a pipeline reads large parameters when the updater is '
                'made; write to another file')
        with self._lock:
            self._file.seek(0)
            with numpy.load(self._file, allow_pickle=True) as found:
                return numpy.array(numpy.broadcast_to(found[key], shape),
                                   dtype, order='C')

    def _stamp(self) -> tuple[int, int]:
        now = os.fstat(self._file.fileno())
        return now.st_mtime_ns, now.st_size


def _check(key: str, found: numpy.ndarray, value: numpy.ndarray) -> None:
    """Raises Chainer's errors about an array that a parameter cannot take."""
    if numpy.broadcast_shapes(found.shape, value.shape) != value.shape:
        raise ValueError(f'could not broadcast {key} from shape '
                         f'{found.shape} into shape {value.shape}')
    if not numpy.can_cast(found.dtype, value.dtype, 'same_kind'):
        raise TypeError(f'cannot cast {key} from {found.dtype} to '
                        f'{value.dtype}')


def _is_large(parameter: chainer.Parameter, shape: tuple[int, ...], dtype: Any
              ) -> bool:
    return (type(parameter) in (chainer.Parameter, DeferredParameter)
            and parameter.layout is None
            and numpy.prod(shape, dtype=float) * dtype.itemsize >= _SMALL)


def _can_be_drawn_again(initializer: Any, shape: tuple[int, ...]) -> bool:
    """Whether a second call gives the same values from the same state."""
    return (type(initializer).__module__.startswith('chainer.initializers.')
            and getattr(initializer, 'rng', None) is None
            # Or the error would come too late.
            and (len(shape) > 1 or isinstance(initializer, (
                constant.Constant, normal.Normal, uniform.Uniform))))


def _draw_and_forget(initializer: Any, shape: tuple[int, ...]) -> None:
    """Moves NumPy's generator on, as if the values had been drawn."""
    kind, count = type(initializer).__module__, int(numpy.prod(shape))
    if kind == constant.__name__:
        return
    known: dict[str, Any] = {normal.__name__: numpy.random.normal,
                             uniform.__name__: numpy.random.uniform}
    draw = known.get(kind)
    if draw is None:
        generate_array(initializer, shape, numpy)
        return
    for start in range(0, count, _CHUNK):
        draw(size=min(_CHUNK, count - start))
