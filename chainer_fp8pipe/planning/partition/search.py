"""Finds a plan for the calls of a model, and predicts what a plan costs."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from .calls import Call, Parameter
from .cuts import CutProblem, best_cut, evaluate
from .intervals import Intervals
from .partition_plan import PartitionPlan, Predicted, ends_of
from .positions import Order


def search(calls: Sequence[Call], order: Order,
           parameters: Mapping[str, Parameter], task: CutProblem
          ) -> PartitionPlan:
    """The plan with the shortest step for the calls of a trace.

    Raises:
        DoesNotFit: There is none under the memory limit.
        ValueError: The model cannot be cut into so many parts.
    """
    intervals = Intervals(calls, order, parameters)
    cut = best_cut(intervals, task)
    return PartitionPlan(
        order, tuple(intervals.starts[end] for end in cut.ends[:-1]),
        task.stages, cut.recompute, task.micro_batches, task.schedule,
        cut.predicted)


def predict(calls: Sequence[Call], plan: PartitionPlan,
            parameters: Mapping[str, Parameter], task: CutProblem
           ) -> Predicted:
    """Predicts seconds and bytes of a plan, which any trace may have given."""
    intervals = Intervals(calls, plan.order, parameters)
    return evaluate(intervals, task, ends_of(
        plan.cuts, intervals.starts)).predicted
