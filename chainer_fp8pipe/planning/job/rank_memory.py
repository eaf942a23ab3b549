"""Bytes that each rank of a configuration needs."""
from __future__ import annotations

from collections.abc import Sequence

from ..partition.cuts import CutProblem, rank_bytes
from ..partition.partition_plan import ends_of
from .configuration import Configuration
from .exchange_memory import exchange_bytes
from .exchanges import plans_of
from .job_profile import JobProfile
from .model_costs import ModelCosts


class MemoryModel:
    """Predicts memory for configurations of one job.

    Args:
        profile: What was measured.
        costs: Of the profile's model.
    """

    def __init__(self, profile: JobProfile, costs: ModelCosts) -> None:
        self._profile, self._costs = profile, costs

    def bytes_of(self, configuration: Configuration, batch: int
                 ) -> tuple[float, ...]:
        """Bytes of each stage's ranks, beyond the interpreter's."""
        if configuration.stages > 1:
            return self._of_pipeline(configuration, batch)
        model = self._profile.model
        intervals = self._costs.intervals(batch / configuration.replicas)
        last = intervals.count
        copies = 2.0 + model.optimizer_arrays
        passes = intervals.kept[0, last] + intervals.plain
        # The first updates wait for no forward pass, and take as much as any.
        update = intervals.updating(intervals.largest[0, last],
                                    intervals.largest_in_heap[0, last])
        return (self._profile.overhead + float(
            intervals.parameters[0, last] * copies
            + max(passes, update))
            + self._of_exchange(configuration, model.elements),)

    def _of_pipeline(self, configuration: Configuration, batch: int
                     ) -> tuple[float, ...]:
        cut, model = configuration.cut, self._profile.model
        assert cut is not None
        intervals = self._costs.intervals(
            batch / configuration.replicas / configuration.micro_batches)
        task = CutProblem(
            cut.stages, cut.micro_batches, cut.schedule, cut.chunks, None,
            2.0 + model.optimizer_arrays, 'auto',
            overhead=self._profile.overhead)
        # With the cut's own recomputation.
        _, found = rank_bytes(intervals, task,
                              ends_of(cut.cuts, intervals.starts),
                              cut.recompute)
        names: list[list[str]] = [[] for _ in range(cut.stages)]
        for name, chunk in cut.homes().items():
            names[chunk % cut.stages].append(name)
        return tuple(
            bytes_ + self._of_exchange(configuration, model.elements_of(of))
            for bytes_, of in zip(found, names, strict=True))

    def least_exchange(self, codecs: Sequence[str], replicas: int) -> float:
        """Bytes that any exchange of an equal share of the model takes."""
        elements = self._profile.model.elements * replicas / (
            self._profile.ranks)
        return min(self._of_exchange(Configuration(
            replicas, codec=codec), int(elements)) for codec in codecs)

    def _of_exchange(self, configuration: Configuration, elements: int
                     ) -> float:
        """Bytes that a communicator keeps for so many elements."""
        if configuration.replicas == 1:
            return 0.0
        given = configuration.options
        return exchange_bytes(configuration.codec, elements, plans_of(
            configuration.algorithm, tuple(sorted(given.items())),
            tuple(range(configuration.replicas))),
            overlap=bool(configuration.overlap), **{
                name: given[name] for name in (
                    'partial_sums', 'frame_bytes', 'frames_in_flight')
                if name in given})
