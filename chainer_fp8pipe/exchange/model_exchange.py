"""The mean of one model's gradients over all ranks."""
# An update's buckets are sent in the order that the model's exchange has; then
# they are waited for:
#
#   overlap=False   all are sent and waited for in mean().
#   overlap=True    from the third update on, buckets are sent during the
#                   backward pass by the exchange's thread, as soon as their
#                   gradients are final; mean() sends the rest and waits for
#                   all.
#
# The results are the same bits in both.
#
# Ranks agree once per update: a digest of names, shapes, dtypes, loss scale
# and number of updates, 16 bytes in one all-reduce (mpi/agreement).  A rank
# whose model and gradients are as they were agreed upon in the last update
# sends its buckets while the digests travel: else a small model would wait for
# a round trip that takes as long as its own.  With overlap, what is sent early
# has the same effect.  Beside that, fp8 finds the largest scales of all ranks,
# in one of 100 updates; replicas are compared every 100.
#
# A bucket that was sent early can become void: a hook, another backward pass
# or the script has changed its gradients since (their digests tell), another
# rank does not agree, or the script drops the update (bcast_data).  Then the
# ranks tell each other how much they have sent; who has sent less than the
# others sends zeros, all drop the means, and what the codec keeps is again
# what it was (Rollback).  So a void bucket changes no number, and is sent
# again, after backward.  Where a rank's exchange has failed, or ranks send in
# different orders, zeros would not match.  After that, and after buckets of an
# update that the ranks refuse, every later update of the communicator raises
# an error, on all ranks.
#
# The first updates travel in float32: early gradients change by orders of
# magnitude from one update to the next, and the fp8 paper begins all its
# comparisons with 100 such updates (section 4.2).
#
# Three threads meet here.  That of the backward pass calls begin and final,
# the exchange's calls step, the main thread calls the others between passes,
# and holds the reducer's turn where it touches what step does.
from __future__ import annotations

import collections
import dataclasses
import functools
import math
import weakref
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import chainer
import numpy
import xxhash

from ..allreduce.engine import LITTLE, Bucket, Engine
from ..codecs import Cast, State, Tensors
from ..mpi.agreement import (
    Waiter,
    agree,
    digest,
    is_raised_by_all,
    raised_by_all,
)
from ..mpi.waiting import BRIEF, LONG, give_way
from .buckets import BucketNames, Passes, divide, send_order
from .drift import ReplicaDrift, compare
from .gradients import (
    SAME_MODEL,
    Gradients,
    distinct_parameters,
    flat_float32,
    problem_of,
)
from .loss_scaling import is_scaled_dynamically
from .rollback import Rollback

if TYPE_CHECKING:
    from .reducer import Reducer

#: Flat arrays by name, as in snapshots.
Saved = dict[str, numpy.ndarray]

_SAME_GRADIENTS = (SAME_MODEL + ' If some ranks do not use a parameter in '
                   'some updates, pass zero_fill=True to '
                   'create_multi_node_optimizer.')
_ONE_MODEL = ("overlap=True with algorithm='aggregator' is for one model; "
              'pass overlap=False')
_FINITE = ('Lower the learning rate, clip gradients, scale the loss, or pass '
           "nonfinite='pass' to create_communicator")


class NonfiniteMean(RuntimeError):
    """A mean is NaN or infinite, which the option ``nonfinite`` forbids."""


@dataclasses.dataclass(eq=False)
class Update:
    """Gradients and buckets of one update, until their means are there.

    Attributes:
        values: Parameters' arrays, flat, by name; {} while nothing is sent
            early.
        loss_scale: The factor of the gradients; None for none.
        missing: By the bucket's number, names of gradients that are not
            final yet.
        arrays: Gradients that are final, by name.
        ready: How many buckets are complete, in the order of sending.
        todo: Numbers of those of them that were not sent yet, each with the
            event that a GPU reaches when it has computed them.
        begun: How many buckets have been sent.
        sent: Buckets, by number.
        digests: Of the contents of gradients when they were sent, by name.
        announced: Gradients are reported by what computes them.
        is_void: What was sent belongs to an earlier step.
    """

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loss_scale: float | None = None
    missing: dict[int, set[str]] = dataclasses.field(default_factory=dict)
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
    ready: int = 0
    todo: collections.deque[tuple[int, Any]] = dataclasses.field(
        default_factory=collections.deque)
    begun: int = 0
    sent: dict[int, Bucket] = dataclasses.field(default_factory=dict)
    digests: dict[str, int] = dataclasses.field(default_factory=dict)
    announced: bool = False
    is_void: bool = False


class ModelExchange:
    """Averages one model's gradients, and keeps what later updates need.

    Args:
        reference: Weak, to the model.
        reducer: The communicator's, of all its models.

    Attributes:
        number: How many other models' gradients were averaged before this
            one's first mean, the same on all ranks; -1: there was none yet.
        updates: Updates finished so far.
        codec_state: What the codec keeps of the model.
        sizes: How many elements each parameter has, by name.
        buckets: As :func:`.divide` gives them.
        order: Their numbers, in the order in which they are sent.
        passes: What backward passes have taught.
        queue: The engine that sends the buckets; None before the first
            update.
        ready: The order is known, so the next update may begin early.
        update: The update under way.
        rollback: What the codec's state was before it.
        failure: The traceback of an error in the exchange's thread, or ''.
    """

    def __init__(self, reference: weakref.ref[chainer.Link], reducer: Reducer
                 ) -> None:
        self.reference = reference
        self._owner = weakref.ref(reducer)      # no cycle
        self._reducer: Any = weakref.proxy(reducer)
        self._first = Cast('float32').init()
        self.number = -1
        self.codec_state = reducer.codec.init()
        self.update = Update()
        self.rollback = Rollback()
        self._wires: dict[int, tuple[Any, numpy.ndarray]] = {}
        self.ready = False
        self.sizes: dict[str, int] = {}
        self.load({})

    @property
    def current(self) -> State:
        """The codec's state in the next update: float32's during warm-up."""
        return (self._first if self.updates < self._reducer.options.warmup
                else self.codec_state)

    def save(self) -> Saved:
        """Returns all that an exact continuation needs."""
        return {'codec|done': numpy.asarray(self.updates),
                **{f'codec|{key}': value
                   for key, value in self.codec_state.save().items()}}

    def load(self, saved: Saved) -> None:
        """Restores what :meth:`save` returned; {}: as of a new model.

        Raises:
            ValueError: It is of another kind of communicator; nothing has
                changed then.
        """
        of_codec = {key.partition('|')[2]: value for key, value
                    in saved.items() if key.startswith('codec|')}
        codec = self.codec_state.codec
        updates, state = 0, codec.init()
        try:
            if saved:
                updates = int(of_codec.pop('done'))
                state = State.load(codec, of_codec)
        except KeyError as error:
            raise ValueError('this is no state of a communicator of '
                             f'chainer_fp8pipe: {error} is not in it'
                             ) from error
        self.updates, self.codec_state = updates, state
        self._agreed: Mapping[str, str] = {}    # of the last update
        self.end()      # what has been sent of an update stays where it is
        self.failure = ''
        self.queue: Engine | None = None
        self._follow({})

    # --- a mean --------------------------------------------------------------

    def mean(self, model: chainer.Link, zero_fill: bool) -> None:
        """See :meth:`.CodecCommunicator.multi_node_mean_grad`."""
        with self._reducer.events.section('exchange'):
            gradients = Gradients(model, zero_fill)
            # A thread has a current device of its own, a caller any.
            with chainer.using_device(_device_of(gradients.arrays)):
                self._average(model, gradients)
        self.updates += 1

    def _average(self, model: chainer.Link, gradients: Gradients) -> None:
        """Replaces gradients by their mean."""
        reducer = self._reducer
        is_new = self.queue is None or gradients.sizes != self.sizes
        self._check(model, gradients, is_new)
        if is_new:
            self._follow(gradients.sizes)
            self.queue = self.queue or reducer.unused_queue()
        bad = []
        with reducer.taken():
            self._raise_failure()   # since the ranks have agreed
            self._send_rest(gradients)
            for bucket in self.update.sent.values():
                if self._receive(bucket):
                    bad.append(bucket)
            self.update = Update()
        if reducer.overlap:
            self.passes.averaged()
            if not is_new:
                self._learn()
        if bad:
            self._raise_nonfinite(bad, model, gradients.loss_scale)
        gradients.write_back(gradients.arrays)

    def _check(self, model: chainer.Link, gradients: Gradients, is_new: bool
               ) -> None:
        """Raises on all ranks if they cannot go on together."""
        reducer = self._reducer
        ranks = reducer.ranks
        entries = {**gradients.entries,
                   # A rank resumed from another snapshot must not go unseen.
                   'the number of updates': str(self.updates),
                   'the number of the model': str(self.number)}
        problem, void = gradients.problem, ''
        if self.failure:
            problem = f'the exchange failed beside backward: {self.failure}'
        if reducer.overlap:
            entries['overlap'] = ('new' if is_new else
                                  'ready' if self.ready else 'known')
            void = self._void(gradients)
            if self.number and reducer.algorithm.one_order:
                problem = problem or _ONE_MODEL
        wait = ranks.wait
        # Only one model's gradients fit those of all ranks without agreement,
        # and zeros only if all its parameters take part.
        if not (is_new or problem or reducer.overlap or reducer.models > 1
                or reducer.algorithm.one_order
                or gradients.entries != self._agreed
                or self.sizes.keys() - gradients.parameters.keys()):
            wait = functools.partial(wait, beside=functools.partial(
                self._send_meanwhile, gradients))
        self._agree(entries, problem, void, wait)
        self._agreed = gradients.entries
        every = reducer.options.check_every
        if (every and self.updates and ranks.comm.size > 1
                and self.updates % every == 0):
            try:
                compare(model, self.updates, ranks)
            except ReplicaDrift:        # on all ranks
                reducer.withdraw(self)
                raise

    def _agree(self, entries: Mapping[str, str], problem: str, void: str,
               wait: Waiter) -> None:
        """Has ranks agree; if only early buckets are void, drops these."""
        reducer, ranks = self._reducer, self._reducer.ranks
        try:
            agree(ranks.comm, entries, problem or void, _SAME_GRADIENTS,
                  wait=wait)
            return
        except ValueError as error:
            # Others come to no more calls where this rank raises alone.
            if not is_raised_by_all(error):
                raise
            was_sent = reducer.withdraw(self)
            if ranks.is_broken:
                raise
            if not reducer.overlap:
                if was_sent:
                    ranks.break_off()
                raise
        try:
            agree(ranks.comm, entries, problem, _SAME_GRADIENTS, wait=wait)
        except ValueError:
            if was_sent:
                ranks.break_off()
            raise

    def _send_meanwhile(self, gradients: Gradients) -> None:
        """Sends all buckets while the ranks' agreement is on its way."""
        assert self.queue is not None
        if not self.update.begun:   # it waits again, to say who disagrees
            self._send_rest(gradients)
        self.queue.work(LITTLE, BRIEF)

    def _void(self, gradients: Gradients) -> str:
        """Why the buckets sent early are void; '' if they are valid."""
        update = self.update
        if not update.ready:
            return ''
        if (update.is_void or gradients.loss_scale != update.loss_scale
                or gradients.sizes != self.sizes):
            return 'the update is another one'
        for number in self.order[:update.ready]:
            for name in self.buckets[number]:
                known = update.digests.get(name)
                if gradients.arrays.get(name) is not update.arrays[name] or (
                        known is not None
                        and _digest(gradients.flat[name]) != known):
                    return f'the gradient of parameter {name} has changed'
        return ''

    def _raise_failure(self) -> None:
        if self.failure:
            raise RuntimeError('the exchange failed beside the training: '
                               f'{self.failure}')

    def _receive(self, bucket: Bucket) -> list[str]:
        """Waits for a bucket's mean, and writes it into the gradients.

        Returns:
            Names of tensors whose mean is not finite.
        """
        assert self.queue is not None
        if not bucket.finished:
            self.queue.finish(bucket)
        with self._reducer.events.section('decode'):
            return bucket.decode()

    def _raise_nonfinite(self, bad: list[Bucket], model: chainer.Link,
                         loss_scale: float | None) -> None:
        """Raises the same on all ranks, before any parameter is updated.

        Unless means may be NaN or infinite.
        """
        ranks, state = self._reducer.ranks, self.current
        wanted = self._reducer.options.nonfinite
        passes = wanted == 'pass' or wanted == 'auto' and (
            loss_scale is not None and is_scaled_dynamically(model))
        name = bad[0].decode()[0]
        # All ranks have the wires alike, so that the others are not here.
        if all(bucket.wire_is_finite for bucket in bad):
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

    def end(self) -> None:
        """Ends the update: what was sent of it is no longer known."""
        self.update = Update()

    # --- buckets, and their order --------------------------------------------

    def _follow(self, sizes: dict[str, int]) -> None:
        """Divides a new set of parameters into buckets."""
        self.ready, self.sizes = False, dict(sizes)
        self.buckets: tuple[BucketNames, ...] = divide(
            sizes, self._reducer.options.bucket_bytes)
        self.order = list(range(len(self.buckets)))
        self.passes = Passes()
        self._bucket_of = {name: number
                           for number, names in enumerate(self.buckets)
                           for name in names}

    def _learn(self) -> None:
        """Chooses the order in which buckets are sent, early from now on.

        All ranks choose the same.
        """
        reducer = self._reducer
        if self.ready:
            return
        self.ready = True
        if reducer.algorithm.one_order:
            return
        names = sorted(self.sizes)
        found = numpy.array([self.passes.finals.get(name, math.inf)
                             for name in names])
        reducer.ranks.mean(found)
        self.order = send_order(self.buckets, dict(zip(
            names, found.tolist(), strict=True)))

    @property
    def signature(self) -> int:
        """A number that differs between ranks that cannot go on together."""
        return digest({
            'model': str(self.number), 'sizes': str(self.sizes),
            'order': str(self.order), 'ready': str(self.ready),
            'updates': str(self.updates)})

    # --- the backward pass ---------------------------------------------------

    def parameters(self) -> Mapping[str, chainer.Parameter]:
        """See :class:`.ready_gradients.Watcher`."""
        model = self.reference()
        if model is None or self._owner() is None:
            return {}
        return {name: parameter
                for name, parameter in distinct_parameters(model)
                if parameter.array is not None and parameter.size
                and parameter.layout is None and not problem_of(
                    name, parameter.array, parameter.grad)}

    def _values(self) -> dict[str, Any]:
        return {name: flat_float32(parameter.array)
                for name, parameter in self.parameters().items()}

    def begin(self, names: set[str], kind: Hashable, models: int,
              loss_scale: float | None) -> bool:
        """See :class:`.ready_gradients.Watcher`."""
        last = self.passes.begin(kind, models)
        if not self.ready:
            return True
        if not last or self.update.values or self.failure:
            return False
        values = self._values()
        if self.sizes != {name: array.size for name, array in values.items()}:
            return False
        missing = {}
        for number in self.order:
            # Buckets behind one that must wait have to wait, too.
            if not names.issuperset(self.buckets[number]):
                break
            missing[number] = set(self.buckets[number])
        if missing:
            self.update = Update(values, loss_scale, missing)
        return bool(missing)

    def announce(self, loss_scale: float | None) -> bool:
        """As :meth:`begin`, for gradients that somebody else reports."""
        # The arrays may be the same as now, with other contents.
        self.update.is_void = self.update.announced
        wanted = self.begin(set(self.parameters()), 'announced', 0,
                            loss_scale)
        self.update.announced = wanted and self.ready
        return wanted

    def final(self, name: str, gradient: Any) -> None:
        """See :class:`.ready_gradients.Watcher`."""
        self.passes.note(name)
        update = self.update
        missing = update.missing.get(self._bucket_of.get(name, -1))
        if not missing:
            return
        missing.discard(name)
        update.arrays[name] = gradient
        before = update.ready
        for number in self.order[before:]:
            if update.missing.get(number) != set():
                break
            update.ready += 1
            update.todo.append((number, None if isinstance(
                gradient, numpy.ndarray) else _computed(gradient)))
        if update.ready > before:
            self._reducer.wake()
            # Where ranks share a core, sending this bucket, and other ranks'
            # gradients of the layer, are more urgent than this pass.
            give_way()

    # --- sending -------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether :meth:`step` has something to do."""
        return not self.failure and bool(self.update.todo or (
            self.queue and not self.queue.idle))

    def step(self, alone: bool) -> bool:
        """Sends and receives; returns whether anything moved.

        Args:
            alone: No other model has anything to send, so a step may take a
                while.
        """
        if self.queue is None or self.failure:
            return False
        update = self.update
        # Gradients are added meanwhile by backward; values stay as they are.
        device = _device_of(update.values)
        # A thread has a current device and stream of its own.
        with chainer.using_device(device):
            moved = bool(update.todo)
            if moved:
                number, computed = update.todo.popleft()
                if computed is not None:
                    device.xp.cuda.get_current_stream().wait_event(computed)
                flat = {name: flat_float32(update.arrays[name])
                        for name in self.buckets[number]}
                if device.xp is numpy:      # a script may write into them
                    update.digests |= {name: _digest(array)
                                       for name, array in flat.items()}
                self._send(number, flat, update.values, update.loss_scale)
            if alone and not update.todo:
                return self.queue.work(LONG) or moved
            return self.queue.work() or moved

    def _send(self, number: int, gradients: Mapping[str, Any],
              values: Mapping[str, Any], loss_scale: float | None,
              contributes: bool = True, decodes: bool = False) -> None:
        """Sends the next bucket, of what has a gradient.

        Args:
            number: Of the bucket.
            gradients: By name, flat.
            values: The parameters, likewise.
            loss_scale: The factor of the gradients; None for none.
            contributes: As for :class:`.Bucket`.
            decodes: Likewise.
        """
        assert self.queue is not None
        update, state = self.update, self.current
        names = [*filter(gradients.__contains__, self.buckets[number])]
        tensors = Tensors(names, map(gradients.__getitem__, names),
                          map(values.__getitem__, names),
                          1.0 if loss_scale is None else loss_scale,
                          state.codec.grain)
        if not tensors.size:
            return
        if not update.begun:
            state.codec.begin(state, tensors.loss_scale)
            self.rollback.begin(state)
        if not decodes:
            self.rollback.keep(names)
        bucket = update.sent[number] = Bucket(
            state, tensors, self.wire(number, tensors.xp, tensors.size),
            contributes=contributes, decodes=decodes, number=number)
        update.begun += 1
        self.queue.submit(bucket)

    def _send_rest(self, gradients: Gradients) -> None:
        """Sends what has not been sent yet."""
        assert self.queue is not None
        update = self.update
        for number in self.order[update.begun:]:
            self._send(number, gradients.flat, gradients.values,
                       gradients.loss_scale, decodes=True)
            self.queue.work()
        # While backward went on, that was not allowed.
        for bucket in update.sent.values():
            if not bucket.decodes:
                self.queue.decode_into(bucket, [
                    gradients.flat[name] for name in bucket.tensors.names])

    def send_zeros(self, count: int, loss_scale: float) -> None:
        """Sends zeros for buckets that other ranks have sent; waits for all.

        Args:
            count: How many the rank sent that sent most.
            loss_scale: That rank's.
        """
        assert self.queue is not None
        update = self.update
        update.todo.clear()
        # All of it is undone, so that any parameters will do.
        known = update.values or self._values()
        values = {
            name: array if array.size == self.sizes[name] else (
                numpy.ones(self.sizes[name], numpy.float32))
            for name in self.sizes
            for array in [known.get(name, numpy.empty(0))]}
        zeros = {name: numpy.zeros_like(array)
                 for name, array in values.items()}
        for number in self.order[update.begun:count]:
            self._send(number, zeros, values, loss_scale, contributes=False)
        for bucket in update.sent.values():
            self.queue.finish(bucket)
        self.rollback.undo()

    def wire(self, bucket: int, xp: Any, size: int) -> numpy.ndarray:
        """The memory of a bucket's wire, used again at the next update.

        Args:
            bucket: Number of the bucket.
            xp: ``numpy`` or ``cupy``, where the gradients are.
            size: Entries.
        """
        assert self.queue is not None
        dtype = self.current.codec.wire_dtype
        known, wire = self._wires.get(bucket, (None, None))
        if (wire is None or known is not xp or wire.size < size
                or wire.dtype != dtype):
            wire = self.queue.empty_wire(xp, size, dtype)
            self._wires[bucket] = xp, wire
        return wire[:size]

    def release(self) -> None:
        """Frees the memory of the wires."""
        self._wires.clear()


def _device_of(arrays: Mapping[str, Any]) -> chainer.backend.Device:
    return chainer.backend.get_device_from_array(
        next(iter(arrays.values()), None))


def _digest(array: Any) -> int:
    return xxhash.xxh3_64_intdigest(array.view(numpy.uint8).data) if (
        isinstance(array, numpy.ndarray)) else 0


def _computed(array: Any) -> Any:
    """A CUDA event behind all work submitted so far."""
    return chainer.backend.get_array_module(
        array).cuda.get_current_stream().record()
