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
# A rank whose model and gradients are as they were agreed upon in the last
# update sends its buckets while the digests travel: else a small model would
# wait for a round trip that takes as long as its own.  If the ranks do not
# agree then, what was sent cannot be taken back: every later update of the
# communicator raises an error, on all ranks.  Beside the digests, fp8 finds
# the largest scales of all ranks, in one of 100 updates; replicas are compared
# every 100.
#
# The first updates travel in float32: early gradients change by orders of
# magnitude from one update to the next, and the fp8 paper begins all its
# comparisons with 100 such updates (section 4.2).
#
# With overlap=True some buckets are sent before mean() is called: early.py.
from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import chainer
import numpy

from ..allreduce.engine import LITTLE, Bucket, Engine
from ..codecs import Cast, Codec, State, Tensors
from ..codecs.staging import empty_wire
from ..mpi.agreement import agree, is_raised_by_all, raised_by_all
from ..mpi.waiting import BRIEF
from ..report.stream import EventStream
from .buckets import Division, divide
from .drift import ReplicaDrift, compare
from .gradients import SAME_MODEL, Gradients
from .loss_scaling import is_scaled_dynamically
from .ranks import Ranks
from .thread import Turn

#: Flat arrays by name, as in snapshots.
Saved = dict[str, numpy.ndarray]

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
        engines: Those of them that send buckets, in the order in which all
            ranks have made them.  With overlap each model has its own, as
            models are sent early in an order of their own on each rank.
        codec: Of gradients after the warm-up.
        events: Where to write what happens.
        options: The communicator's ``Options``, of which ``warmup``,
            ``bucket_bytes``, ``nonfinite`` and ``check_every`` count here.
        turn: Of the main thread and the exchange's; None without overlap.
        exchanges: Those of all models, by the model's id, the oldest first.
        models: How many models' gradients were averaged.
        is_closed: The communicator is finalized, or is no more.
    """

    ranks: Ranks
    engines: list[Engine]
    codec: Codec
    events: EventStream
    options: Any
    turn: Turn | None = None
    exchanges: dict[int, Exchange] = dataclasses.field(default_factory=dict)
    models: int = 0
    is_closed: bool = False

    @property
    def one_order(self) -> bool:
        """Whether all buckets come in one order, whatever model they are of.
        """
        return self.engines[0].one_order

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """A ``with`` block during which the exchange's thread stands still."""
        if self.turn is None:
            yield               # there is none
            return
        with self.turn.taken(self.engines):
            yield

    def close(self) -> None:
        """Nothing more is sent early; calls nobody, takes no lock."""
        self.is_closed = True


class Exchange:
    """Averages one model's gradients, and keeps what later updates need.

    Args:
        model: A weak reference to it.
        setup: Of the communicator.

    Attributes:
        model: See above.
        setup: See above.
        number: How many other models' gradients were averaged before this
            one's first mean, the same on all ranks; -1: there was none yet.
        updates: Updates finished so far.
        state: What the codec keeps of the model.
        engine: Sends the buckets; None before the first update.
        division: The parameters in buckets.
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

    def save(self) -> Saved:
        """Returns all that an exact continuation needs."""
        return {'codec|done': numpy.asarray(self.updates),
                **{f'codec|{key}': value
                   for key, value in self.state.save().items()}}

    def load(self, saved: Saved) -> None:
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
        self.updates, self.state = updates, state
        self._agreed: Mapping[str, str] = {}    # of the last update
        # What has been sent of an update stays where it is.
        self.sent: dict[int, Bucket] = {}
        self.engine: Engine | None = None
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
        is_new = self.engine is None or gradients.sizes != self.division.sizes
        self._check(model, gradients, is_new)
        if is_new:
            self._follow(gradients.sizes)
            self.engine = self.engine or self._new_engine()
        with self.setup.taken():
            self._send_rest(gradients)
            bad = [bucket for bucket in self.sent.values()
                   if self._receive(bucket)]
            self.sent = {}
        self._averaged(is_new)
        if bad:
            self._raise_nonfinite(bad, model, gradients.loss_scale)
        gradients.write_back(gradients.arrays)

    def _check(self, model: chainer.Link, gradients: Gradients, is_new: bool
               ) -> None:
        """Raises on all ranks if they cannot go on together."""
        setup = self.setup
        entries = {**gradients.entries,
                   # A rank resumed from another snapshot must not go unseen.
                   'the number of updates': str(self.updates),
                   'the number of the model': str(self.number)}
        every = setup.options.check_every
        compares = bool(every and self.updates and setup.ranks.comm.size > 1
                        and self.updates % every == 0)
        # Only one model's gradients fit those of all ranks without agreement,
        # and only if all its parameters take part.
        known = (not (is_new or compares or gradients.problem or setup.turn
                      or setup.models > 1 or setup.one_order)
                 and gradients.entries == self._agreed
                 and self.division.sizes.keys() == gradients.parameters.keys())
        self._agree(entries, gradients, is_new, known)
        self._agreed = gradients.entries
        if compares:
            try:
                compare(model, self.updates, setup.ranks)
            except ReplicaDrift:        # on all ranks
                self.withdraw()
                raise

    def _agree(self, entries: dict[str, str], gradients: Gradients,
               is_new: bool, known: bool) -> None:
        """Has the ranks agree, and sends buckets meanwhile.

        Args:
            entries: What must be equal on all ranks.
            gradients: Of this rank.
            is_new: The set of parameters is another one than before.
            known: All ranks are likely to agree.
        """
        ranks = self.setup.ranks
        try:
            agree(ranks.comm, entries, gradients.problem, SAME_GRADIENTS,
                  wait=functools.partial(
                      ranks.wait, beside=functools.partial(
                          self._send_meanwhile, gradients))
                  if known else ranks.wait)
        except ValueError as error:
            # Others come to no more calls where this rank raises alone.
            if is_raised_by_all(error):
                self.withdraw()
            raise

    def _send_meanwhile(self, gradients: Gradients) -> None:
        assert self.engine is not None
        if not self.sent:       # it waits again, to say who disagrees
            self._send_rest(gradients)
        self.engine.work(LITTLE, BRIEF)

    def withdraw(self) -> bool:
        """Drops what ranks may have sent; call it on all of them.

        Returns:
            Whether any rank had sent anything.
        """
        was_sent = any(self.setup.ranks.allgather(len(self.sent)))
        if was_sent:
            self.setup.ranks.break_off()
        self.sent = {}
        return was_sent

    def _averaged(self, is_new: bool) -> None:
        """Learns from an update; for those who send early."""

    def _receive(self, bucket: Bucket) -> list[str]:
        """Waits for a bucket's mean, and writes it into the gradients.

        Returns:
            Names of tensors whose mean is not finite.
        """
        assert self.engine is not None
        if not bucket.finished:
            self.engine.finish(bucket)
        with self.setup.events.section('decode'):
            return bucket.decode()

    def _raise_nonfinite(self, bad: list[Bucket], model: chainer.Link,
                         loss_scale: float | None) -> None:
        """Raises the same on all ranks, before any parameter is updated.

        Unless means may be NaN or infinite.
        """
        ranks, state = self.setup.ranks, self.current
        wanted = self.setup.options.nonfinite
        passes = wanted == 'pass' or wanted == 'auto' and (
            loss_scale is not None and is_scaled_dynamically(model))
        name = bad[0].decode()[0]
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
        self.division = Division(dict(sizes), divide(
            sizes, self.setup.options.bucket_bytes))

    @property
    def order(self) -> Sequence[int]:
        """Numbers of buckets in the order in which they are sent."""
        return range(len(self.division.buckets))

    def _new_engine(self) -> Engine:
        return self.setup.engines[0]

    def _send_rest(self, gradients: Gradients) -> None:
        """Sends what has not been sent yet."""
        assert self.engine is not None
        self._begin(gradients.loss_scale)
        for number in self.order:
            if number not in self.sent:
                self._send(number, gradients.flat, gradients.values,
                           gradients.loss_scale, decodes=True)
                self.engine.work()

    def _begin(self, loss_scale: float | None) -> None:
        """Begins the codec's update, with the first bucket."""
        if not self.sent:
            self.current.codec.begin(
                self.current, 1.0 if loss_scale is None else loss_scale)

    def _send(self, number: int, gradients: Mapping[str, Any],
              values: Mapping[str, Any], loss_scale: float | None,
              contributes: bool = True, decodes: bool = False) -> None:
        """Sends a bucket, of what has a gradient.

        Args:
            number: Of the bucket.
            gradients: By name, flat.
            values: The parameters, likewise.
            loss_scale: The factor of the gradients; None for none.
            contributes: As for :class:`.Bucket`.
            decodes: Likewise.
        """
        assert self.engine is not None
        names = [name for name in self.division.buckets[number]
                 if name in gradients]
        tensors = Tensors(names, map(gradients.__getitem__, names),
                          map(values.__getitem__, names),
                          1.0 if loss_scale is None else loss_scale,
                          self.current.codec.grain)
        if tensors.size:
            self.sent[number] = Bucket(
                self.current, tensors,
                self.wire(number, tensors.xp, tensors.size),
                contributes=contributes, decodes=decodes, number=number)
            self.engine.submit(self.sent[number])

    def wire(self, bucket: int, xp: Any, size: int) -> numpy.ndarray:
        """The memory of a bucket's wire, used again at the next update.

        Args:
            bucket: Number of the bucket.
            xp: ``numpy`` or ``cupy``, where the gradients are.
            size: Entries.
        """
        dtype = self.current.codec.wire_dtype
        known, wire = self._wires.get(bucket, (None, None))
        if (wire is None or known is not xp or wire.size < size
                or wire.dtype != dtype):
            wire = empty_wire(xp, size, dtype)
            self._wires[bucket] = xp, wire
        return wire[:size]

    def leave(self) -> bool:
        """The model or the communicator is no more; False: it is needed yet.
        """
        self._wires.clear()
        return True


def device_of(arrays: Mapping[str, Any]) -> chainer.backend.Device:
    """Where arrays are; the CPU if there are none."""
    return chainer.backend.get_device_from_array(
        next(iter(arrays.values()), None))
