"""What a communicator remembers of each model whose gradients it averages."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy

from ..allreduce.algorithm import Algorithm
from ..codecs import Cast, Codec
from .buckets import BucketNames, divide

State = dict[str, numpy.ndarray]

_NO_WIRE = numpy.empty(0, numpy.uint8)


class ModelState:
    """Codec and loss scale of one model, and memory for its wires.

    The first updates travel in ``float32``: early gradients change by orders
    of magnitude from one update to the next, and the fp8 paper begins all
    its comparisons with 100 such updates (section 4.2).

    Args:
        number: In which place the model came, counted from 0.
        codec: The codec after the warm-up.
        warm_up: Updates that travel in float32.

    Attributes:
        updates: Updates finished so far.
        scaling_is_dynamic: Whether the loss scale looks like one of Chainer's
            dynamic loss scaling, which skips an update whose gradients are
            not finite; static loss scaling does not.
    """

    def __init__(self, number: int, codec: Codec, warm_up: int = 0) -> None:
        self.number = number
        self.codec = codec
        self.warm_up = warm_up
        self.updates = 0
        self.scaling_is_dynamic = False
        self._first = Cast('float32')
        self._loss_scale = 0.0
        self._wires: dict[int, tuple[Any, numpy.ndarray]] = {}
        self._divided: tuple[dict[str, int], tuple[BucketNames, ...]] = {}, ()

    @property
    def current(self) -> Codec:
        """The codec of the update to come."""
        return self._first if self.updates < self.warm_up else self.codec

    def buckets(self, sizes: dict[str, int], limit: int
                ) -> tuple[BucketNames, ...]:
        """See :func:`.divide`; the same object while sizes are the same."""
        if sizes != self._divided[0]:
            self._divided = dict(sizes), divide(sizes, limit)
        return self._divided[1]

    def wire(self, bucket: int, codec: Codec, xp: Any, size: int,
             algorithm: Algorithm) -> numpy.ndarray:
        """The wire of a bucket; the same memory at the next update.

        Args:
            bucket: Number of the bucket.
            codec: Of the wire.
            xp: ``numpy`` or ``cupy``, where the gradients are.
            size: Entries.
            algorithm: To which the bucket goes; has the memory.
        """
        known, wire = self._wires.get(bucket, (None, _NO_WIRE))
        if (known is not xp or wire.size < size
                or wire.dtype != codec.wire_dtype):
            wire = algorithm.empty_wire(xp, size, codec.wire_dtype)
            self._wires[bucket] = xp, wire
        return wire[:size]

    def release(self) -> None:
        """Gives up the memory of the wires."""
        self._wires.clear()

    def see(self, loss_scale: float | None) -> None:
        """Notes the loss scale of the update to come."""
        if loss_scale is None:
            self.scaling_is_dynamic = False
            return
        # Dynamic scaling starts at 1, which no one would choose as a static
        # scale, and changes.
        changed = self._loss_scale not in (0.0, loss_scale)
        self.scaling_is_dynamic |= changed or loss_scale == 1.0
        self._loss_scale = loss_scale

    def state(self) -> State:
        """All that must be saved for an exact continuation."""
        return {'dynamic': numpy.asarray(self.scaling_is_dynamic),
                'loss_scale': numpy.asarray(self._loss_scale),
                'codec|done': numpy.asarray(self.updates),
                **{f'codec|{key}': value
                   for key, value in self.codec.state().items()}}

    def load_state(self, state: State) -> None:
        """Takes over what :meth:`state` gave."""
        codec = {key.partition('|')[2]: value for key, value in state.items()
                 if key.startswith('codec|')}
        updates = int(codec.pop('done'))
        self.codec.load_state(codec)
        self.updates = updates
        self.scaling_is_dynamic = bool(state['dynamic'])
        self._loss_scale = float(state['loss_scale'])


class ModelStates:
    """The state of every model, in the order in which they first came.

    Two models (a generator and a discriminator) may have parameters of the
    same names; what is learnt from one must not be used for the other.

    Args:
        make: Makes the state of the model of this number.
    """

    def __init__(self, make: Callable[[int], ModelState]) -> None:
        self._make = make
        self._states = [make(0)]
        self._models: list[weakref.ref[chainer.Link]] = []

    def __iter__(self) -> Iterator[ModelState]:
        return iter(self._states)

    def of(self, model: chainer.Link) -> ModelState:
        """The state of ``model``, a fresh one if it is new."""
        for known, state in zip(self._models, self._states, strict=False):
            if known() is model:
                return state
        for known, state in zip(self._models, self._states, strict=False):
            if known() is None:
                state.release()
        self._models.append(weakref.ref(model))
        if len(self._models) > len(self._states):
            self._states.append(self._make(len(self._states)))
        return self._states[len(self._models) - 1]

    def release(self) -> None:
        """Gives up the memory of all wires."""
        for state in self._states:
            state.release()

    def state(self) -> State:
        """All that must be saved for an exact continuation."""
        return {f'{number}|{key}': value
                for number, state in enumerate(self._states)
                for key, value in state.state().items()}

    def load_state(self, state: State) -> None:
        """Takes over what :meth:`state` gave.

        Models must come in the same order again.

        Raises:
            ValueError: It was given by another kind of communicator.
        """
        parts: dict[str, State] = {}
        for key, value in state.items():
            number, _, rest = key.partition('|')
            parts.setdefault(number, {})[rest] = value
        restored = []
        for index in range(len(parts)):
            restored.append(self._make(index))
            try:
                restored[-1].load_state(parts[str(index)])
            except KeyError as error:
                raise ValueError('this is no state of a communicator of '
                                 f'chainer_fp8pipe: {error} is not in it'
                                 ) from error
        if not restored:
            raise ValueError('this state of a communicator is empty')
        while len(restored) < len(self._models):
            restored.append(self._make(len(restored)))
        self._states = restored
