"""A Chain of which this rank holds a part."""
from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import chainer

from ..intercept.function_calls import current
from ..planning.partition_plan import PartitionPlan, values_in_words
from ..report.quantities import columns, size
from .ghost import GhostError, user_line
from .partitioned import Partition
from .valueless_parameters import fetching


class PartitionedChain:
    """What :func:`partition` adds to the class of a model.

    Attributes:
        partition: What this rank knows of the cut.
    """

    partition: Partition

    @property
    def plan(self) -> PartitionPlan:
        """Where the model is cut."""
        return self.partition.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current() is None and fetching.now is not None:
            fetching.now()
        elif current() is None and not self.partition.is_whole:
            raise GhostError(
                f'{user_line()}: this model is on several ranks, and each '
                "has a part: call the updater's update(), evaluate() or "
                'predict() on all ranks instead of the model')
        model: Any = super()
        return model.__call__(*args, **kwargs)

    def params(self, include_uninit: bool = True
               ) -> Iterator[chainer.Parameter]:
        """The parameters on this rank."""
        for _, parameter in self.namedparams(include_uninit):
            yield parameter

    def namedparams(self, include_uninit: bool = True
                    ) -> Iterator[tuple[str, chainer.Parameter]]:
        """The parameters on this rank, with their names in the model.

        In the model's own forward, and where somebody fetches the others'
        values: all parameters.
        """
        found = (self.partition.own
                 if current() is None and fetching.now is None
                 else self.partition.names.parameters)
        for name, parameter in found.items():
            if include_uninit or parameter.is_initialized:
                yield name, parameter

    def serialize(self, serializer: Any) -> None:
        """Saves or loads what is on this rank, under the model's names."""
        kind: Any = (_OwnDeserializer if isinstance(
            serializer, chainer.Deserializer) else _OwnSerializer)
        model: Any = super()
        model.serialize(kind(serializer, self))

    def __str__(self) -> str:
        return table(self.partition)

    def __repr__(self) -> str:
        plan = self.partition.plan
        return (f'<{type(self).__name__}: stage '
                f'{self.partition.grid.stage_index} of {plan.stages}>')


class _Own:
    """A serializer that leaves out what other ranks have."""

    def __init__(self, serializer: Any, link: Any,
                 root: Any = None) -> None:
        self._serializer, self._link = serializer, link
        self._root = link if root is None else root

    def __getitem__(self, key: str) -> Any:
        child = _child(self._link, key)
        return type(self)(self._serializer[key], child, self._root)

    def __call__(self, key: str, value: Any) -> Any:
        link = self._link
        if link is not None and (key in link._params
                                 or key in link._persistent) and not (
                self._root.partition.is_own(link, key)):
            return value
        return self._serializer(key, value)


class _OwnSerializer(_Own, chainer.Serializer):
    pass


class _OwnDeserializer(_Own, chainer.Deserializer):
    pass


@functools.lru_cache(None)
def class_of(kind: Any) -> Any:
    """The class that a partitioned model of a class gets."""
    return type(kind.__name__, (PartitionedChain, kind), {
        '__module__': kind.__module__, '__qualname__': kind.__qualname__})


def _child(link: Any, key: str) -> Any:
    if isinstance(link, chainer.ChainList):
        try:
            # Not link[...]: a Sequential counts functions there.
            return link._children[int(key)]
        except (ValueError, IndexError):
            return None
    child = vars(link).get(key) if link is not None else None
    return child if isinstance(child, chainer.Link) else None


def table(partition: Any) -> str:
    """A line per chunk: ranks, time, memory, and what is sent on."""
    plan, predicted = partition.plan, partition.plan.predicted
    total = sum(predicted.busy) or 1.0
    rows = [['stage', 'rank', 'time', 'parameters', 'memory',
             'sends on', 'first parameter']]
    for chunk in range(partition.last + 1):
        stage = chunk % plan.stages
        rows.append([
            plan.label(chunk),
            ' '.join(map(str, partition.grid.placement.ranks[stage])),
            f'{100 * predicted.busy[chunk] / total:.0f} %'
            if predicted.busy else '',
            size(sum(map(partition.parameter_bytes, partition.used[chunk]))),
            size(predicted.memory[stage]) if predicted.memory else '',
            values_in_words(partition.crossing[chunk], 2)
            if chunk < partition.last else '',
            plan.first(chunk) + ' (again)' * plan.recompute[chunk]])
    notes = ['(again): keeps its inputs only, and runs forward twice'] * any(
        plan.recompute)
    for name, ranks in partition.ties.items():
        notes.append(f'{name} is on stages '
                     + ' and '.join(map(str, ranks))
                     + ', which sum its gradient')
    return '\n'.join([
        plan.headline(partition.title, partition.grid.replicas),
        *columns(rows), *notes])
