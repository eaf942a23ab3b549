"""Buckets that are sent while backward goes on (``overlap=True``)."""
# From the third update on, a bucket is sent by the exchange's thread as soon
# as its gradients are final (intercept/ready_gradients); mean() sends the rest
# and waits for all.  The results are the same bits as without overlap.
#
# A bucket that was sent early can become void: another backward pass or the
# script has changed its gradients since, another rank does not agree, or the
# script drops the update (bcast_data).  Then the ranks tell each other how
# much they have sent; who has sent less than the others sends zeros, all drop
# the means, and what the codec keeps is again what it was (State.undo).  So a
# void bucket changes no number, and is sent again, after backward.  Where a
# rank's exchange has failed, or ranks send in different orders, zeros would
# not match.  After that, and after buckets of an update that the ranks refuse,
# every later update of the communicator raises an error, on all ranks.
#
# Nobody can have changed a gradient where ChainerMN's optimizer has called
# both backward and the mean, without a line of the script in between.  That is
# seen in the stack.  Else the contents of gradients on the host are digested
# where they are sent and again in mean(), two passes over memory; gradients on
# a GPU are not sent early then.
#
# Three threads meet here.  That of the backward pass calls begin and final,
# the exchange's calls step, the main thread calls the others between passes,
# and holds the turn where it touches what step does.
from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import sys
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import chainer
import numpy
import xxhash
from chainermn.optimizers import _MultiNodeOptimizer

from ..allreduce.engine import Engine
from ..intercept import ready_gradients
from ..intercept.training_objects import LIBRARIES
from ..mpi.agreement import agree, digest, is_raised_by_all
from ..mpi.waiting import LONG, give_way
from .buckets import Passes, send_order
from .exchange import SAME_GRADIENTS, Exchange, Setup, device_of
from .gradients import (
    Gradients,
    distinct_parameters,
    flat_float32,
    problem_of,
)
from .thread import exchange_thread

#: Called with a parameter and the array that will be its gradient.
Final = Callable[[chainer.Parameter, Any], None]

#: What a rank without the model says in :meth:`EarlyExchange.withdraw`.
NOTHING_SENT = 0, False, None, 1.0

_ONE_MODEL = ("overlap=True with algorithm='aggregator' is for one model; "
              'pass overlap=False')


@dataclasses.dataclass(eq=False)
class Early:
    """Gradients and buckets of an update that are sent before its mean.

    Attributes:
        values: Parameters' arrays, flat, by name; {}: nothing is sent early.
        loss_scale: The factor of the gradients; None for none.
        source: Of the gradients: the frame of ChainerMN's ``update`` that has
            called backward; ``'announced'``; None: another one.
        missing: By the bucket's number, names of gradients that are not
            final yet.
        arrays: Gradients that are final, by name.
        ready: How many buckets are complete, in the order of sending.
        todo: Numbers of those of them that were not sent yet, each with the
            event that a GPU reaches when it has computed them.
        digests: Of the contents of gradients when they were sent, by name.
        is_void: What was sent belongs to an earlier step.
    """

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loss_scale: float | None = None
    source: FrameType | str | None = None
    missing: dict[int, set[str]] = dataclasses.field(default_factory=dict)
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
    ready: int = 0
    todo: collections.deque[tuple[int, Any]] = dataclasses.field(
        default_factory=collections.deque)
    digests: dict[str, int] = dataclasses.field(default_factory=dict)
    is_void: bool = False


@dataclasses.dataclass(eq=False)
class Learnt:
    """What earlier updates have taught, and the state of sending.

    Attributes:
        passes: What backward passes have taught.
        order: Numbers of buckets in the order in which they are sent; the
            order of all ranks, and so may buckets be sent early, where
            ``is_known``.
        failure: The traceback of an error in the exchange's thread, or ''.
    """

    passes: Passes = dataclasses.field(default_factory=Passes)
    order: Sequence[int] = ()
    is_known: bool = False
    failure: str = ''


class EarlyExchange(Exchange):
    """An exchange whose buckets are sent during the backward pass.

    It watches passes (:class:`.ready_gradients.Watcher`).

    Attributes:
        early: What is sent early of the update under way.
        learnt: What earlier ones have taught.
    """

    def __init__(self, model: weakref.ref[chainer.Link], setup: Setup
                 ) -> None:
        self.early, self.learnt = Early(), Learnt()
        super().__init__(model, setup)
        ready_gradients.watch(self)

    # --- a mean --------------------------------------------------------------

    @property
    def order(self) -> Sequence[int]:
        return self.learnt.order

    def _follow(self, sizes: Mapping[str, int]) -> None:
        super()._follow(sizes)
        self.early = Early()
        self.learnt = Learnt(order=super().order)

    def _new_engine(self) -> Engine:
        """An engine that no model uses on any rank; a new one if need be."""
        setup = self.setup
        if setup.one_order:
            return setup.engines[0]
        taken = [exchange.engine for exchange in setup.exchanges.values()]
        used = setup.ranks.allgather([
            not engine.idle or engine in taken for engine in setup.engines])
        place = [*map(any, zip(*used, strict=True)), False].index(False)
        if place == len(setup.engines):
            setup.engines.append(setup.engines[0].another())
            setup.engines[-1].listen = setup.ranks.listen
        return setup.engines[place]

    def _agree(self, entries: dict[str, str], gradients: Gradients,
               is_new: bool, known: bool) -> None:
        """Has ranks agree; if only early buckets are void, drops these."""
        ranks, learnt = self.setup.ranks, self.learnt
        entries['overlap'] = ('new' if is_new else
                              'ready' if learnt.is_known else 'known')
        problem = gradients.problem
        if self.number and self.setup.one_order:
            problem = problem or _ONE_MODEL
        if learnt.failure:
            problem = f'the exchange failed beside backward: {learnt.failure}'
        try:
            agree(ranks.comm, entries, problem or self._void(gradients),
                  SAME_GRADIENTS, wait=ranks.wait)
            return
        except ValueError as error:
            # Others come to no more calls where this rank raises alone.
            if not is_raised_by_all(error):
                raise
            was_sent = self.withdraw()
            if ranks.is_broken:
                raise
        try:
            agree(ranks.comm, entries, problem, SAME_GRADIENTS,
                  wait=ranks.wait)
        except ValueError:
            if was_sent:
                ranks.break_off()
            raise

    def _void(self, gradients: Gradients) -> str:
        """Why the buckets sent early are void; '' if they are valid."""
        early = self.early
        if not early.ready:
            return ''
        source = early.source
        if (early.is_void or gradients.loss_scale != early.loss_scale
                or gradients.sizes != self.division.sizes
                or isinstance(source, FrameType) and source is not _update()):
            return 'the update is another one'
        for number in self.order[:early.ready]:
            for name in self.division.buckets[number]:
                known = early.digests.get(name)
                if gradients.arrays.get(name) is not early.arrays[name] or (
                        known is not None
                        and _digest(gradients.flat[name]) != known):
                    return f'the gradient of parameter {name} has changed'
        return ''

    def withdraw(self) -> bool:
        """Cancels an update that ranks may have begun; call it on all of them.

        What only some ranks have sent, the others answer with zeros, so that
        no message is left on its way.  If an exchange has failed, or the
        ranks' orders differ, the ranks are broken off instead.

        Returns:
            Whether any rank had sent anything.
        """
        ranks, learnt = self.setup.ranks, self.learnt
        with self.setup.taken():
            begun, failures, signatures, factors = zip(*ranks.allgather((
                len(self.sent), bool(learnt.failure), self._signature,
                self.early.loss_scale or 1.0)), strict=True)
            if any(failures) or (any(begun) and len(set(signatures)) > 1):
                ranks.break_off()
            elif any(begun):
                self._send_zeros(max(begun), max(factors))
            learnt.passes.averaged()
            self.early, self.sent = Early(), {}
        return any(begun)

    @property
    def _signature(self) -> int:
        """A number that differs between ranks that cannot go on together."""
        return digest({
            'model': str(self.number), 'sizes': str(self.division.sizes),
            'order': str(self.order), 'known': str(self.learnt.is_known),
            'updates': str(self.updates)})

    def _send_zeros(self, count: int, loss_scale: float) -> None:
        """Sends zeros for buckets that other ranks have sent; waits for all.

        Args:
            count: How many the rank sent that sent most.
            loss_scale: That rank's.
        """
        assert self.engine is not None
        self.early.todo.clear()
        # All of it is undone, so that any parameters will do.
        known = self.early.values or self._values()
        values = {
            name: array if array.size == size else (
                numpy.ones(size, numpy.float32))
            for name, size in self.division.sizes.items()
            for array in [known.get(name, numpy.empty(0))]}
        zeros = {name: numpy.zeros_like(array)
                 for name, array in values.items()}
        self._begin(loss_scale)
        for number in self.order[len(self.sent):count]:
            self._send(number, zeros, values, loss_scale, False)
        for bucket in self.sent.values():
            self.engine.finish(bucket)
        self.current.undo()

    def _send_rest(self, gradients: Gradients) -> None:
        assert self.engine is not None
        if self.learnt.failure:     # since the ranks have agreed
            raise RuntimeError('the exchange failed beside the training: '
                               f'{self.learnt.failure}')
        super()._send_rest(gradients)
        # While backward went on, that was not allowed.
        for bucket in self.sent.values():
            if not bucket.decodes:
                self.engine.decode_into(bucket, [
                    gradients.flat[name] for name in bucket.tensors.names])
        self.early = Early()

    def _averaged(self, is_new: bool) -> None:
        """Chooses the order in which buckets are sent, early from now on.

        All ranks choose the same.
        """
        learnt = self.learnt
        learnt.passes.averaged()
        if is_new or learnt.is_known:
            return
        learnt.is_known = True
        if self.setup.one_order:
            return
        names = sorted(self.division.sizes)
        found = numpy.array([learnt.passes.finals.get(name, math.inf)
                             for name in names])
        self.setup.ranks.mean(found)
        learnt.order = send_order(self.division.buckets, dict(zip(
            names, found.tolist(), strict=True)))

    def leave(self) -> bool:
        if self.busy or self.learnt.failure and not self.setup.is_closed:
            return False        # its engine is not for others
        ready_gradients.unwatch(self)
        return super().leave()

    # --- the backward pass ---------------------------------------------------

    def parameters(self) -> Mapping[str, chainer.Parameter]:
        """See :class:`.ready_gradients.Watcher`."""
        model = self.model()
        if model is None or self.setup.is_closed:
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
        last = self.learnt.passes.begin(kind, models)
        if not self.learnt.is_known:
            return True
        return (last and not self.early.values and not self.learnt.failure
                and self._begin_early(names, loss_scale, _update()))

    def _begin_early(self, names: set[str], loss_scale: float | None,
                     source: FrameType | str | None) -> bool:
        values = self._values()
        if self.division.sizes != {name: array.size
                                for name, array in values.items()}:
            return False
        if source is None and device_of(values).xp is not numpy:
            return False        # nobody would see that they change
        missing = {}
        for number in self.order:
            # Buckets behind one that must wait have to wait, too.
            if not names.issuperset(self.division.buckets[number]):
                break
            missing[number] = set(self.division.buckets[number])
        if missing:
            self.early = Early(values, loss_scale, source, missing)
        return bool(missing)

    @contextlib.contextmanager
    def announced(self, loss_scale: float | None) -> Iterator[Final]:
        """See :meth:`.CodecCommunicator.announced`."""
        # The arrays may be the same as now, with other contents.
        self.early.is_void = self.early.source == 'announced'
        parameters = self.parameters()
        self.learnt.passes.begin('announced', 0)
        names: dict[int, str] = {}
        if not self.learnt.is_known or not (
                self.early.values or self.learnt.failure) and (
                    self._begin_early({*parameters}, loss_scale,
                                      'announced')):
            names = {id(parameter): name
                     for name, parameter in parameters.items()}

        def final(parameter: chainer.Parameter, gradient: Any) -> None:
            if id(parameter) in names:
                self.final(names[id(parameter)], gradient)
        yield final

    def final(self, name: str, gradient: Any) -> None:
        """See :class:`.ready_gradients.Watcher`."""
        self.learnt.passes.note(name)
        early = self.early
        number = next((number for number, missing in early.missing.items()
                       if name in missing), None)
        if number is None:
            return
        early.missing[number].discard(name)
        early.arrays[name] = gradient
        before = early.ready
        for number in self.order[before:]:
            if early.missing.get(number) != set():
                break
            early.ready += 1
            early.todo.append((number, None if isinstance(
                gradient, numpy.ndarray) else _computed(gradient)))
        if early.ready > before:
            exchange_thread.wake(self)
            # Where ranks share a core, sending this bucket, and other ranks'
            # gradients of the layer, are more urgent than this pass.
            give_way()

    # --- the exchange's thread -----------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether :meth:`step` has something to do."""
        return bool(self.engine and not self.learnt.failure
                    and not self.setup.is_closed
                    and (self.early.todo or not self.engine.idle))

    def step(self, alone: bool) -> bool:
        """Sends and receives a little; returns whether anything moved.

        Args:
            alone: No other model has anything to send, so a step may take a
                while.
        """
        setup = self.setup
        assert setup.turn is not None
        with setup.turn.tried(0.05 if alone else 1e-3) as has_turn:
            if not has_turn or not self.busy:
                return False
            setup.events.hide()
            try:
                with setup.events.section('exchange'):
                    return self._step(alone)
            except Exception:       # the main thread raises it
                self.learnt.failure = traceback.format_exc()
                return False

    def _step(self, alone: bool) -> bool:
        assert self.engine is not None
        early = self.early
        # Gradients are added meanwhile by backward; values stay as they are.
        device = device_of(early.values)
        # A thread has a current device and stream of its own.
        with chainer.using_device(device):
            moved = bool(early.todo)
            if moved:
                number, computed = early.todo.popleft()
                if computed is not None:
                    device.xp.cuda.get_current_stream().wait_event(computed)
                flat = {name: flat_float32(early.arrays[name])
                        for name in self.division.buckets[number]}
                if early.source is None:    # a script may write into them
                    early.digests |= {name: _digest(array)
                                      for name, array in flat.items()}
                self._begin(early.loss_scale)
                self._send(number, flat, early.values, early.loss_scale)
            if alone and not early.todo:
                return self.engine.work(LONG) or moved
            return self.engine.work() or moved

    def _begin(self, loss_scale: float | None) -> None:
        if not self.sent:
            super()._begin(loss_scale)
            self.current.hold()


def _update() -> FrameType | None:
    """The ``update`` of ChainerMN's optimizer that leads straight here.

    None where a line of the script is between it and this.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get(
            '__name__', '').partition('.')[0] in LIBRARIES:
        if frame.f_code is _MultiNodeOptimizer.update.__code__:
            return frame
        frame = frame.f_back
    return None


def _digest(array: Any) -> int:
    return xxhash.xxh3_64_intdigest(array.view(numpy.uint8).data)


def _computed(array: Any) -> Any:
    """A CUDA event behind all work submitted so far."""
    return chainer.backend.get_array_module(
        array).cuda.get_current_stream().record()
