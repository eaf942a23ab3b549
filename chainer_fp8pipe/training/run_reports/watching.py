"""What a rank notes of each update: sections, times, and what it reported."""
from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import chainer
import numpy

from ...intercept.patching import AroundCalls
from ...report.record import (
    COMMUNICATION,
    PHASES,
    CurvePoint,
    Quartiles,
    RankInterval,
    RecordedUpdate,
)
from ...report.stream import EventStream, Section, events_of
from ..extensions.update_marks import CallMark, mark_update

_NAME = 'RunReport'
_NUMBERS = numpy.ndarray, numpy.number, float, int

#: Points of one start before they become means of twice as many updates.
_MANY = 500

#: Updates that a rank offers as slow ones, and how many are kept of those.
_OFFERED, _KEPT_SLOW = 6, 2
#: An update is slow if it takes so many times as long as the median.
_SLOW_FROM = 1.25


def epochs_done(updater: Any) -> float:
    """Passes over the data, with the part of the last one; 0.0: unknown."""
    return float(getattr(updater, 'epoch_detail', 0.0))


class UpdateSections:
    """Writes down input, passes, exchange and update, until removed.

    A pipeline writes its passes, exchange and update itself.  Elsewhere,
    ``forward`` is the outermost call of an optimizer's model in training, and
    what a loss function computes outside of it is in no section.

    Args:
        stream: Where to write.
        updater: Whose updates they are.
        writes_itself: It is a pipeline's.

    Attributes:
        calls: Calls of methods that are made in ``with`` blocks.
    """

    def __init__(self, stream: EventStream, updater: Any,
                 writes_itself: bool) -> None:
        self._stream, self.calls = stream, AroundCalls()
        self._open: list[Section] = []
        self._undo: list[Callable[[], None]] = []
        for iterator in (getattr(updater, '_iterators', None) or {}).values():
            self._watch(iterator, 'input', 'next', '__next__')
        if writes_itself:
            return
        self._watch(chainer.Variable, 'backward', 'backward')
        for optimizer in updater.get_all_optimizers().values():
            self._watch(getattr(optimizer, 'communicator', None), 'exchange',
                        'bcast_data', 'multi_node_mean_grad')
            actual = getattr(optimizer, 'actual_optimizer', optimizer)
            actual.target.add_hook(CallMark(*self._ends_of('forward')), _NAME)
            self._undo += [
                functools.partial(actual.target.delete_hook, _NAME),
                mark_update(actual, _NAME, *self._ends_of('update'))]

    def settle(self) -> None:
        """An update is over: ends what an error has left open."""
        while self._open:
            self._open.pop().__exit__(None, None, None)

    def remove(self) -> None:
        """Writes nothing any more."""
        self.settle()
        self.calls.remove()
        while self._undo:
            # A user may have removed the hook as well.
            with contextlib.suppress(KeyError):
                self._undo.pop()()

    def _watch(self, owner: Any, section: str, *methods: str) -> None:
        for name in methods:
            self.calls.add(owner, name,
                           functools.partial(self._stream.section, section))

    def _ends_of(self, name: str) -> tuple[Callable[[], None], ...]:
        """What begins a section, and what ends it."""
        return tuple(functools.partial(act, name)
                     for act in (self._begin, self._end))

    def _begin(self, name: str) -> None:
        section = self._stream.section(name)
        section.__enter__()
        self._open.append(section)

    def _end(self, name: str) -> None:
        # What an error has left open inside of it ends with it.
        while any(section.name == name for section in self._open):
            self._open.pop().__exit__(None, None, None)


class CurveMeans:
    """Makes points of the values that updates report.

    At first each update is a point.  As points become many, a point is the
    mean over two updates, then over four, and so on.

    Args:
        start: Number of the start.
        iteration: Updates done before.
    """

    def __init__(self, start: int, iteration: int) -> None:
        self._start, self._begin = start, iteration
        self._clear()
        self._points: list[CurvePoint] = []
        self._made, self._updates = 0, 1

    def add(self, trainer: Any) -> None:
        """Takes over what an update and extensions have reported."""
        updater = trainer.updater
        self._sum_up(trainer.observation)
        if (updater.iteration - self._begin) % self._updates:
            return
        values = {name: total / count for name, (total, count)
                  in self._sums.items()}
        values |= {name: float(value) for name, value
                   in self._summary.compute_mean().items()}
        self._clear()
        if not values:
            return
        self._points.append(CurvePoint(
            self._start, updater.iteration,
            epochs_done(updater), trainer.elapsed_time, values))
        self._made += 1
        if self._made % _MANY == 0:
            self._updates *= 2

    def take(self) -> list[CurvePoint]:
        """The points since the last call."""
        points, self._points = self._points, []
        return points

    def _clear(self) -> None:
        # By name, the sum of values on the CPU, and how many there were.
        self._sums: dict[str, tuple[float, int]] = {}
        self._summary = chainer.reporter.DictSummary()

    def _sum_up(self, observation: Mapping[str, Any]) -> None:
        others = {}
        for name, value in observation.items():
            if isinstance(value, chainer.Variable):
                value = value.array
            if isinstance(value, _NUMBERS) and numpy.ndim(value) == 0:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + float(value), count + 1
            elif not isinstance(value, (str, bytes)):
                others[name] = value
        if others:      # such as those on a GPU, which are not waited for
            self._summary.add(others)


# --- times of updates --------------------------------------------------------

class _Lap(NamedTuple):
    """From the end of an update to the end of the next."""

    iteration: int
    end: float
    busy: float                 # from the update's begin to its end
    seconds: dict[str, float]   # by section, since the stream began
    outside: dict[str, float]   # the same when the update began
    hidden: dict[str, float]
    bytes: tuple[int, int, int]     # gradients; to stages: sent, whole


class UpdateTimes:
    """Notes each update's times, and keeps the events of some updates.

    Args:
        stream: Where updates write what they do.
        rank: Of this process.
        now: When the first step begins, by ``time.monotonic``.
        iteration: Updates done so far.
    """

    def __init__(self, stream: EventStream, rank: int, now: float,
                 iteration: int) -> None:
        self._stream, self._rank = stream, rank
        # It connects, allocates, and sends parameters only: like no other.
        self._first = iteration + 1
        self._written = stream.keep()
        self.update_begins(now)
        self._before = self._lap(iteration, now)
        self.choose(())
        self._clear()

    def choose(self, regular: Collection[int]) -> None:
        """Says of which updates the events are kept, by number."""
        self._regular = frozenset(regular)

    def end(self) -> None:
        """Notes nothing any more."""
        self._stream.keep_no_more(self._written)

    def update_begins(self, now: float) -> None:
        """An update begins; ``now`` is that of ``time.monotonic``.

        Time between updates, such as that of an evaluation, is no update's.
        """
        self._begin, self._outside = now, dict(self._stream.seconds)

    def update_ends(self, now: float, iteration: int) -> None:
        """The update of that number is done; ``now`` as above."""
        busy, taken = now - self._begin, self._written[:]
        # The exchange's thread may have appended meanwhile.
        del self._written[:len(taken)]
        self._laps.append(self._lap(iteration, now))
        is_slow = iteration not in self._regular
        if iteration == self._first or is_slow and (
                len(self._slow) >= _OFFERED
                and busy <= self._slow[-1].seconds):
            return
        kept = RecordedUpdate(0, iteration, is_slow, tuple(
            event for event in events_of(taken, self._rank, 0.0)
            if event.end > self._begin or event.lane), busy)
        if is_slow:
            self._slow.append(kept)
            self._slow.sort(key=lambda one: -one.seconds)
            del self._slow[_OFFERED:]
        else:
            self._kept.append(kept)

    def summary(self, start: int) -> tuple[
            RankInterval | None, tuple[float, float, float],
            list[RecordedUpdate]]:
        """What this rank did since the last call.

        Args:
            start: Number of the start that it is in.

        Returns:
            The interval, None if no update has ended in it; the mean bytes
            of an update: of gradients, sent to stages, and what that was
            before a codec; the updates whose events were kept, on this
            rank's own clock, and those offered as slow ones.
        """
        if not self._laps:
            return None, (0.0, 0.0, 0.0), []
        laps = [self._before, *self._laps]
        self._before = laps[-1]
        steps = numpy.diff([lap.end for lap in laps])
        busy = numpy.array([lap.busy for lap in laps[1:]])
        sections = {name: numpy.array([
            lap.seconds.get(name, 0.0) - lap.outside.get(name, 0.0)
            for lap in laps[1:]]) for name in laps[-1].seconds}
        nothing = numpy.zeros(len(steps))
        means = {name: float(values.mean())
                 for name, values in sections.items()}
        # Measuring takes time, too, so that sections may add up to more than
        # the update.
        means['other'] = max(0.0, float(
            (busy - sum(sections.values(), nothing)).mean()))
        means['between'] = float((steps - busy).mean())
        hidden = {name: (seconds - laps[0].hidden.get(name, 0.0)) / len(steps)
                  for name, seconds in laps[-1].hidden.items()}
        interval = RankInterval(
            start, self._rank, laps[1].iteration, laps[-1].iteration,
            _quartiles(steps), _quartiles(steps - sum(
                (sections.get(name, nothing) for name in COMMUNICATION),
                nothing)),
            {name: means[name] for name in PHASES if means.get(name)},
            {name: seconds for name, seconds in hidden.items() if seconds})
        gradients, to_stages, whole = (
            (numpy.array(laps[-1].bytes) - laps[0].bytes) / len(steps))
        kept = [one._replace(start=start) for one in (*self._kept, *(
            one for one in self._slow
            if one.seconds > _SLOW_FROM * numpy.median(busy)))]
        self._clear()
        return interval, (float(gradients), float(to_stages),
                          float(whole)), kept

    def _clear(self) -> None:
        self._laps: list[_Lap] = []
        self._kept: list[RecordedUpdate] = []
        self._slow: list[RecordedUpdate] = []

    def _lap(self, iteration: int, now: float) -> _Lap:
        stream = self._stream
        return _Lap(iteration, now, now - self._begin, dict(stream.seconds),
                    self._outside, dict(stream.hidden), (
                        stream.bytes_sent, stream.stage_bytes,
                        stream.stage_arrays))


def together(everyone: Sequence[Sequence[RecordedUpdate]]
             ) -> list[RecordedUpdate]:
    """The updates of which all ranks have kept the events, with all of them.

    Of those that were slow on a rank, the slowest; ``everyone`` has what each
    rank has kept.
    """
    by_update: dict[int, list[RecordedUpdate]] = defaultdict(list)
    for one in (one for kept in everyone for one in kept):
        by_update[one.iteration].append(one)
    whole = [found[0]._replace(
        is_slow=any(one.is_slow for one in found),
        events=tuple(event for one in found for event in one.events),
        seconds=max(one.seconds for one in found))
        for found in by_update.values() if len(found) == len(everyone)]
    slow = sorted((one for one in whole if one.is_slow),
                  key=lambda one: -one.seconds)
    return sorted(one for one in whole if one not in slow[_KEPT_SLOW:])


def _quartiles(numbers: numpy.ndarray) -> Quartiles:
    low, median, high = numpy.quantile(numbers, [0.25, 0.5, 0.75]).tolist()
    return low, median, high
