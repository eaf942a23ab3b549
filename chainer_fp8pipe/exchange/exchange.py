"""The mean of one model's gradients over all ranks."""
# The way of an update:
#
#     Exchange.mean      finds the gradients (gradients.py) and divides them
#                        into buckets (buckets.py)
#     _check             the ranks agree that they are about to do the same: a
#                        digest of names, shapes, dtypes, loss scale and number
#                        of updates, 16 bytes in one all-reduce
#     _send_rest         buckets go to the engine, in the order of all ranks
#     _receive           their means are written into the gradients
#
# Beside the digests, fp8 finds the largest scales of all ranks, in one of 100
# updates; replicas are compared every 100.
#
# The first updates travel in float32: early gradients change by orders of
# magnitude from one update to the next, and the fp8 paper begins all its
# comparisons with 100 such updates (section 4.2).
#
# With overlap=True some buckets are sent before mean() is called: early.py.
from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import chainer
import numpy

from ..allreduce.engine import Bucket, Engine
from ..codecs import Cast, Codec, State, Tensors
from ..codecs.staging import empty_wire
from ..mpi.agreement import agree, raised_by_all
from ..report.stream import EventStream
from .buckets import divide
from .drift import ReplicaDrift, compare
from .gradients import SAME_MODEL, Gradients
from .ranks import Ranks

SAME_GRADIENTS = (SAME_MODEL + ' If some ranks do not use a parameter in '
                   'some updates, pass zero_fill=True to '
                   'create_multi_node_optimizer.')
_FINITE = ('Lower the learning rate, clip gradients, scale the loss, or pass '
           "nonfinite='pass' to create_communicator")


class NonfiniteMean(RuntimeError):
    """A mean is NaN or infinite, which the option ``nonfinite`` forbids."""


@dataclasses.dataclass(eq=False)
class Setup:
    """What the exchanges of a communicator's models have in common.

    Attributes:
        ranks: Who exchanges.
        engine: Sends buckets.
        codec: Of gradients after the warm-up.
        events: Where to write what happens.
        options: The communicator's ``Options``, of which ``warmup``,
            ``bucket_bytes``, ``nonfinite`` and ``check_every`` count here.
        exchanges: Those of all models, by the model's id, the oldest first.
        models: How many models' gradients were averaged.
        early: Has sent buckets of an update whose mean was not asked for yet.
    """

    ranks: Ranks
    engine: Engine
    codec: Codec
    events: EventStream
    options: Any
    exchanges: dict[int, Exchange] = dataclasses.field(default_factory=dict)
    models: int = 0
    early: Any = None           # EarlyExchange | None


class Exchange:
    """Averages one model's gradients, and keeps what later updates need.

    Args:
        model: A weak reference to it.
        setup: Of the communicator.

    Attributes:
        model, setup: See above.
        number: How many other models' gradients were averaged before this
            one's first mean, the same on all ranks; -1: there was none yet.
        updates: Updates finished so far.
        state: What the codec keeps of the model.
        sizes: Elements by the parameter's name.
        buckets: Names of the parameters that travel together.
        order: Numbers of buckets in the order in which they are sent.
        sent: The buckets of the update under way, by number.
    """

    def __init__(self, model: weakref.ref[chainer.Link], setup: Setup
                 ) -> None:
        self.model, self.setup = model, setup
        self.number = -1
        self._first = Cast('float32').init()
        self._wires: dict[int, tuple[Any, numpy.ndarray]] = {}
        self.state = setup.codec.init()
        self.load({})

    @property
    def current(self) -> State:
        """The codec's state in the next update: float32's during warm-up."""
        return (self._first if self.updates < self.setup.options.warmup
                else self.state)

    def save(self) -> dict[str, numpy.ndarray]:
        """Returns all that an exact continuation needs."""
        return {'codec|done': numpy.asarray(self.updates),
                **{f'codec|{key}': value
                   for key, value in self.state.save().items()}}

    def load(self, saved: Mapping[str, numpy.ndarray]) -> None:
        """Restores what :meth:`save` returned; {}: as of a new model.

        Raises:
            ValueError: It is of another kind of communicator; nothing has
                changed then.
        """
        of_codec = {key.partition('|')[2]: value for key, value
                    in saved.items() if key.startswith('codec|')}
        codec = self.state.codec
        updates, state = 0, codec.init()
        try:
            if saved:
                updates = int(of_codec.pop('done'))
                state = State.load(codec, of_codec)
        except KeyError as error:
            raise ValueError('this is no state of a communicator of '
                             f'chainer_fp8pipe: {error} is not in it'
                             ) from error
        # A copy withdraws the void buckets that the former state encoded.
        if self.setup.early is self:
            self.setup.early = copy.copy(self)
        self.updates, self.state = updates, state
        self.sent: dict[int, Bucket] = {}
        self._follow({})

    # --- a mean --------------------------------------------------------------

    def mean(self, model: chainer.Link, zero_fill: bool) -> None:
        """See :meth:`.CodecCommunicator.multi_node_mean_grad`."""
        with self.setup.events.section('exchange'):
            gradients = Gradients(model, zero_fill)
            # A thread has a current device of its own, a caller any.
            with chainer.using_device(device_of(gradients.arrays)):
                self._average(model, gradients)
        self.updates += 1

    def _average(self, model: chainer.Link, gradients: Gradients) -> None:
        """Replaces gradients by their mean."""
        self._check(model, gradients)
        if gradients.sizes != self.sizes:
            self._follow(gradients.sizes)
        self._send_rest(gradients)
        bad = []
        for bucket in self.sent.values():
            self.setup.engine.finish(bucket)
            with self.setup.events.section('decode'):
                if bucket.decode():
                    bad.append(bucket)
        self.sent = {}
        self.current.keep()
        if bad:
            self._raise_nonfinite(bad, model, gradients.loss_scale)
        gradients.write_back(gradients.arrays)

    def _check(self, model: chainer.Link, gradients: Gradients) -> None:
        """Raises on all ranks if they cannot go on together."""
        ranks, every = self.setup.ranks, self.setup.options.check_every
        self._agree({**gradients.entries,
                     # A rank resumed from another snapshot is to be noticed.
                     'the number of updates': str(self.updates),
                     'the number of the model': str(self.number)}, gradients)
        if (every and self.updates and ranks.comm.size > 1
                and self.updates % every == 0):
            try:
                compare(model, self.updates, ranks)
            except ReplicaDrift:        # on all ranks
                self.withdraw()
                raise

    def _agree(self, entries: dict[str, str], gradients: Gradients) -> None:
        """Has the ranks agree on entries, which must be equal on all."""
        agree(self.setup.ranks.comm, entries, gradients.problem,
              SAME_GRADIENTS, wait=self.setup.ranks.wait)

    def withdraw(self) -> object:
        """Drops what ranks have sent before; call it on all of them."""

    def _raise_nonfinite(self, bad: list[Bucket], model: chainer.Link,
                         loss_scale: float | None) -> None:
        """Raises the same on all ranks, before any parameter is updated.

        Unless means may be NaN or infinite.
        """
        ranks, state = self.setup.ranks, self.current
        wanted = self.setup.options.nonfinite
        passes = wanted == 'pass' or wanted == 'auto' and (
            loss_scale is not None and is_scaled_dynamically(model))
        name = bad[0].tensors.nonfinite[0]
        # All ranks have the wires alike, so that the others are not here.
        if all(bucket.tensors.wire_is_finite for bucket in bad):
            if passes:
                return
            raise NonfiniteMean(
                f'the value of {name}, or its product with the ratio, is '
                f'not finite on rank {ranks.comm.rank}. No parameter was '
                f'updated here. {_FINITE}.')
        everyone = ranks.allgather((passes, state.nonfinite))
        if all(passes for passes, _ in everyone):
            return
        culprits = [
            f'{found[0]} is not finite in {state.codec.name} on rank {rank}'
            + (f' (and {len(found) - 1} more)' if found[1:] else '')
            for rank, (_, found) in enumerate(everyone) if found]
        text = '; '.join(culprits) or (
            f'the sum over ranks of the gradient of {name} overflowed')
        raise raised_by_all(NonfiniteMean(
            f'{text}. No parameter was updated. {_FINITE}.'))

    # --- buckets -------------------------------------------------------------

    def _follow(self, sizes: Mapping[str, int]) -> None:
        """Divides a new set of parameters into buckets."""
        self.sizes = dict(sizes)
        self.buckets = divide(sizes, self.setup.options.bucket_bytes)
        self.order: Sequence[int] = range(len(self.buckets))

    def _send_rest(self, gradients: Gradients) -> None:
        """Sends what has not been sent yet."""
        self._begin(gradients.loss_scale)
        for number in self.order:
            if number not in self.sent:
                self._send(number, gradients.flat, gradients.values,
                           decodes=True)
                self.setup.engine.work()

    def _begin(self, loss_scale: float | None) -> None:
        """Begins the codec's update, with the first bucket."""
        if not self.sent:
            self.current.codec.begin(
                self.current, 1.0 if loss_scale is None else loss_scale)

    def _send(self, number: int, gradients: Mapping[str, Any],
              values: Mapping[str, Any], contributes: bool = True,
              decodes: bool = False) -> None:
        """Sends a bucket, of what has a gradient.

        Args:
            number: Of the bucket.
            gradients: By name, flat.
            values: The parameters, likewise.
            contributes, decodes: As for :class:`.Bucket`.
        """
        names = [name for name in self.buckets[number]
                 if name in gradients]
        tensors = Tensors(names, map(gradients.__getitem__, names),
                          map(values.__getitem__, names),
                          self.current.codec.grain)
        if tensors.size:
            self.sent[number] = Bucket(
                self.current, tensors,
                self.wire(number, tensors.xp, tensors.size),
                contributes=contributes, decodes=decodes, number=number)
            self.setup.engine.submit(self.sent[number])

    def wire(self, bucket: int, xp: Any, size: int) -> numpy.ndarray:
        """The memory of a bucket's wire, used again at the next update."""
        dtype = self.current.codec.wire_dtype
        known, wire = self._wires.get(bucket, (None, None))
        if (wire is None or known is not xp or wire.size < size
                or wire.dtype != dtype):
            wire = empty_wire(xp, size, dtype)
            self._wires[bucket] = xp, wire
        return wire[:size]


def device_of(arrays: Mapping[str, Any]) -> chainer.backend.Device:
    """Where arrays are; the CPU if there are none."""
    return chainer.backend.get_device_from_array(
        next(iter(arrays.values()), None))


def is_scaled_dynamically(model: chainer.Link) -> bool:
    """Whether the optimizers of a model skip updates that are not finite.

    A communicator is given no optimizer, and a model does not know its
    optimizers.  So they are looked up among all objects of Python, which takes
    some 0.1 seconds: it is only asked where a mean is not finite.
    """
    gc.collect()        # not those that nobody has any more
    own = {id(parameter) for parameter in model.params()}
    found = [
        bool(getattr(one, '_loss_scaling_is_dynamic', False))
        for one in gc.get_objects() if issubclass(type(one), chainer.Optimizer)
        and one.target is not None
        and own.intersection(map(id, one.target.params()))]
    return bool(found) and all(found)
