"""What a communicator remembers of each model whose gradients it averages."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy

from ..codecs import Cast, Codec
from ..codecs.staging import empty_wire
from .buckets import BucketNames, divide

State = dict[str, numpy.ndarray]


class WarmUp:
    """``float32`` for the first updates, then another codec.

    Section 4.2 of the fp8 paper.

    Early gradients change by orders of magnitude from one update to the
    next; the paper lets the first 100 updates travel in float32 in all its
    comparisons.

    Args:
        codec: The codec after the warm-up.
        updates: Length of the warm-up; 0 for none.

    Attributes:
        done: Updates finished so far.
    """

    def __init__(self, codec: Codec, updates: int) -> None:
        self.codec = codec
        self.updates = updates
        self.done = 0
        self._first = Cast('float32')

    @property
    def current(self) -> Codec:
        """The codec of the update to come."""
        return self._first if self.done < self.updates else self.codec

    def state(self) -> dict[str, numpy.ndarray]:
        """All that must be saved for an exact continuation."""
        return {'done': numpy.asarray(self.done), **self.codec.state()}

    def load_state(self, state: dict[str, numpy.ndarray]) -> None:
        """Takes over what :meth:`state` gave."""
        rest = dict(state)
        done = int(rest.pop('done'))
        self.codec.load_state(rest)
        self.done = done


class ModelState:
    """Codec and loss scale of one model, and memory for its wires.

    Attributes:
        number: In which place the model came, counted from 0.
        warm_up: The codec, with what it has learnt from this model.
        scaling_is_dynamic: Whether the loss scale looks like one of Chainer's
            dynamic loss scaling, which skips an update whose gradients are
            not finite; static loss scaling does not.
    """

    def __init__(self, number: int, warm_up: WarmUp) -> None:
        self.number = number
        self.warm_up = warm_up
        self.scaling_is_dynamic = False
        self._loss_scale = 0.0
        self._wires: dict[int, numpy.ndarray] = {}
        self._divided: tuple[dict[str, int], tuple[BucketNames, ...]] = {}, ()

    def buckets(self, sizes: dict[str, int], limit: int
                ) -> tuple[BucketNames, ...]:
        """See :func:`.divide`; the same object while sizes are the same."""
        if sizes != self._divided[0]:
            self._divided = dict(sizes), divide(sizes, limit)
        return self._divided[1]

    def wire(self, bucket: int, codec: Codec, xp: Any, size: int
             ) -> numpy.ndarray:
        """The wire of a bucket; the same memory at the next update."""
        wire = self._wires.get(bucket)
        if (wire is None or wire.size < size
                or wire.dtype != codec.wire_dtype):
            wire = empty_wire(xp, size, codec.wire_dtype)
            self._wires[bucket] = wire
        return wire[:size]

    def release(self) -> None:
        """Gives up the memory of the wires: the model is no more."""
        self._wires.clear()

    def see(self, loss_scale: float | None) -> None:
        """Takes notice of the loss scale of the update to come."""
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
                **{f'codec|{key}': value
                   for key, value in self.warm_up.state().items()}}

    def load_state(self, state: State) -> None:
        """Takes over what :meth:`state` gave."""
        self.warm_up.load_state({
            key.partition('|')[2]: value for key, value in state.items()
            if key.startswith('codec|')})
        self.scaling_is_dynamic = bool(state['dynamic'])
        self._loss_scale = float(state['loss_scale'])


class ModelStates:
    """The state of every model, in the order in which they first came.

    Two models (a generator and a discriminator) may have parameters of the
    same names; what is learnt from one must not be used for the other.

    Args:
        make: Makes the codec of a model.
    """

    def __init__(self, make: Callable[[], WarmUp]) -> None:
        self._make = make
        self._states = [ModelState(0, make())]
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
            self._states.append(
                ModelState(len(self._states), self._make()))
        return self._states[len(self._models) - 1]

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
            restored.append(ModelState(index, self._make()))
            try:
                restored[-1].load_state(parts[str(index)])
            except KeyError as error:
                raise ValueError('this is no state of a communicator of '
                                 f'chainer_fp8pipe: {error} is not in it'
                                 ) from error
        if not restored:
            raise ValueError('this state of a communicator is empty')
        while len(restored) < len(self._models):
            restored.append(ModelState(len(restored), self._make()))
        self._states = restored
