"""Cuts a model again, with the times of its calls in training."""
from __future__ import annotations

import dataclasses
import sys
from typing import Any

from ...planning.partition.cuts import CutProblem, DoesNotFit
from ...planning.partition.partition_plan import PartitionPlan, load_plan
from ...planning.partition.search import predict, search
from ...planning.sizes import said_bytes
from ..names import parameters_of
from ..tracing.traced_call import Trace
from .laps import Laps

#: A new plan must be faster by this share.  With 5 %, ranks that share cores
#: changed plans because of noise, and for the worse.
_GAIN = 0.1


class Adapter:
    """Times the calls of the first updates, and then plans again.

    Args:
        partition: Of the model.
        trace: Of the example.
        task: Of the present plan.
        updates: After how many updates to plan again.
    """

    def __init__(self, partition: Any, trace: Trace, task: CutProblem,
                 updates: int) -> None:
        self._partition, self._trace, self._task = partition, trace, task
        self._updates, self._done = updates, 0

    def before_update(self, programs: list[Any]) -> None:
        """Has calls timed if all micro-batches are as the example."""
        passes = self._partition.passes
        if self._done and all(program.trace.digest == self._trace.digest
                              for program in programs):
            if passes.laps is None:
                passes.laps = Laps(self._partition.device)
        else:
            passes.laps = None

    def after_update(self, optimizer: Any) -> bool:
        """Plans again when it is time; says whether the model was cut anew.

        Call it on all ranks.  The optimizer makes update rules.
        """
        self._done += 1
        if self._done < self._updates:
            return False
        part = self._partition
        part.adapter = None
        laps, part.passes.laps = part.passes.laps, None
        found = part.grid.comm.allgather(laps.medians() if laps else {})
        plan = self._plan(found)
        if plan is None:
            return False
        before = part.plan
        if plan.cuts == before.cuts and plan.recompute == before.recompute:
            part.plan = plan
            return False
        sent = part.replan(plan, self._trace, optimizer)
        if part.grid.comm.rank == 0:
            self._announce(plan, sent)
        return True

    def _plan(self, found: list[dict[int, tuple[float, float]]]
              ) -> PartitionPlan | None:
        """The same on all ranks; None: nothing was timed."""
        comm = self._partition.grid.comm
        times: dict[int, list[tuple[float, float]]] = {}
        for several in found:
            for number, seconds in several.items():
                times.setdefault(number, []).append(seconds)
        if not times:
            return None
        plan = (self._better(times).as_dict() if comm.rank == 0 else None)
        return load_plan(comm.bcast(plan))

    def _better(self, times: dict[int, list[tuple[float, float]]]
               ) -> PartitionPlan:
        """The present plan with new figures, or one that is faster."""
        part, calls = self._partition, list(self._trace.calls)
        for number, several in times.items():
            forward, backward = (sum(column) / len(column)
                                 for column in zip(*several, strict=True))
            calls[number] = dataclasses.replace(
                calls[number], forward=forward, backward=backward)
        parameters = parameters_of(part.names)
        now = dataclasses.replace(part.plan, predicted=predict(
            calls, part.plan, parameters, self._task))
        self._seconds = now.predicted.seconds
        try:
            best = search(calls, part.plan.order, parameters, self._task)
        except DoesNotFit:
            return now
        if best.predicted.seconds < now.predicted.seconds * (1 - _GAIN):
            return best
        return now

    def _announce(self, plan: PartitionPlan, sent: int) -> None:
        sys.stderr.write(
            f'{self._partition.title} was cut again with times from '
            f'training: {said_bytes(sent)} moved between ranks, a step takes '
            f'{plan.predicted.seconds * 1e3:.0f} ms instead of '
            f'{self._seconds * 1e3:.0f} ms by prediction\n')
        sys.stderr.flush()
