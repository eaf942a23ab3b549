"""What a communicator remembers of each model whose gradients it averages."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy

from ..allreduce.engine import Algorithm
from ..codecs import Cast, Codec
from ..codecs import State as CodecState
from .buckets import BucketNames, divide

State = dict[str, numpy.ndarray]

_NO_WIRE = numpy.empty(0, numpy.uint8)


class ModelState:
    """Codec and loss scale of one model, and memory for its wires.

    The first updates travel in ``float32``: early gradients change by orders
    of magnitude from one update to the next, and the fp8 paper begins all
    its comparisons with 100 such updates (section 4.2).

    Args:
        codec: The codec after the warm-up.
        warm_up: Updates that travel in float32.

    Attributes:
        codec_state: What that codec keeps.
        number: How many models' gradients were averaged before this one's
            first, the same on all ranks; -1: this one's were not yet.
        updates: Updates finished so far.
        scaling_is_dynamic: Whether the loss scale looks like one of Chainer's
            dynamic loss scaling, which skips an update whose gradients are
            not finite; static loss scaling does not.
    """

    def __init__(self, codec: Codec, warm_up: int = 0) -> None:
        self.number = -1
        self.codec_state = codec.init()
        self.warm_up = warm_up
        self.updates = 0
        self.scaling_is_dynamic = False
        self._first = Cast('float32').init()
        self._loss_scale = 0.0
        self._wires: dict[int, tuple[Any, numpy.ndarray]] = {}
        self._divided: tuple[dict[str, int], tuple[BucketNames, ...]] = {}, ()

    @property
    def current(self) -> CodecState:
        """That of the codec of the update to come."""
        return (self._first if self.updates < self.warm_up
                else self.codec_state)

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
                   for key, value in self.codec_state.save().items()}}

    def load_state(self, state: State) -> None:
        """Takes over what :meth:`state` gave."""
        codec = {key.partition('|')[2]: value for key, value in state.items()
                 if key.startswith('codec|')}
        updates = int(codec.pop('done'))
        self.codec_state = self.codec_state.codec.load(codec)
        self.updates = updates
        self.scaling_is_dynamic = bool(state['dynamic'])
        self._loss_scale = float(state['loss_scale'])


class ModelStates:
    """The state of every model, for as long as the model lives.

    Two models (a generator and a discriminator) may have parameters of the
    same names; what is learnt from one must not be used for the other.  So a
    model is known by itself.  Whoever saves a state knows what its model is
    for, and gives it to the model that is for the same.

    Args:
        make: Makes the state of a new model.
    """

    def __init__(self, make: Callable[[], ModelState]) -> None:
        self._make = make
        self._states: dict[int, tuple[weakref.ref[chainer.Link],
                                     ModelState]] = {}
        self._averaged = 0

    def __iter__(self) -> Iterator[ModelState]:
        return iter([state for _, state in list(self._states.values())])

    def models(self) -> list[chainer.Link]:
        """All models, in the order in which they came."""
        found = [reference() for reference, _ in list(self._states.values())]
        return [model for model in found if model is not None]

    def known(self, model: chainer.Link) -> ModelState | None:
        """The state of ``model``; None if it is new."""
        reference, state = self._states.get(id(model), (None, None))
        return state if reference and reference() is model else None

    def of(self, model: chainer.Link) -> ModelState:
        """The state of ``model``, whose gradients are to be averaged.

        All ranks must come here with new models in the same order.
        """
        state = self.known(model) or self._remember(model, self._make())
        if state.number < 0:
            state.number = self._averaged
            self._averaged += 1
        return state

    def release(self) -> None:
        """Gives up the memory of all wires."""
        for state in self:
            state.release()

    def load(self, model: chainer.Link, saved: State) -> None:
        """Gives a model the state that :meth:`ModelState.state` returned.

        Raises:
            ValueError: It was returned by another kind of communicator;
                nothing has changed then.
        """
        old, state = self.known(model), self._make()
        state.number = old.number if old else -1
        try:
            if saved:       # or it had not been averaged
                state.load_state(saved)
        except KeyError as error:
            raise ValueError('this is no state of a communicator of '
                             f'chainer_fp8pipe: {error} is not in it'
                             ) from error
        self._remember(model, state)

    def _remember(self, model: chainer.Link, state: ModelState
                  ) -> ModelState:
        own, key = weakref.ref(self), id(model)     # no cycle

        def forget(reference: weakref.ref[chainer.Link]) -> None:
            states = own()
            # Another model may be there by now.
            if states and states._states.get(key, (None,))[0] is reference:
                del states._states[key]
        self._states[key] = weakref.ref(model, forget), state
        return state
