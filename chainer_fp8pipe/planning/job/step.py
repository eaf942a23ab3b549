"""Predicts a training step: of replicas, overlapped or not, or a pipeline."""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from .all_at_once import together
from .configuration import Configuration
from .exchanges import Exchanges, ExchangeTime, doubled
from .job_profile import Figure, JobProfile
from .model_costs import ModelCosts
from .overlap_run import OverlapRun
from .pipeline_model import PipelineModel

#: Of an exchange's figures, which shorter ones have given, the part that is
#: sure.
_SURE = 0.98


class StepPrediction(NamedTuple):
    """How long a step takes, and of what.

    Attributes:
        seconds: Of a whole update, and the spread of what was measured.
        parts: Seconds by name, which add up to the whole: ``forward and
            backward`` (of the busiest rank), ``waiting for stages``,
            ``exchange`` (what of it nothing hides), ``update``, ``other``.
    """

    seconds: Figure
    parts: Mapping[str, float]


class StepModel:
    """Predicts steps of one job.

    Args:
        profile: What was measured.
        batch: Samples of an update, of all replicas together.

    Attributes:
        costs: Of the model.
        pipelines: Predicts what of a step is a pipeline's own.
    """

    def __init__(self, profile: JobProfile, batch: int) -> None:
        self.profile, self.batch = profile, batch
        self.costs = ModelCosts(profile.model)
        self._exchanges = Exchanges(profile)
        self.pipelines = PipelineModel(profile, batch, self.costs,
                                       self._exchanges)

    def predict(self, configuration: Configuration) -> StepPrediction:
        """The step of a configuration.

        Raises:
            ValueError: The configuration does not fit the ranks.
        """
        ranks = configuration.stages * configuration.replicas
        if ranks != self.profile.ranks:
            raise ValueError(f'{configuration} is for {ranks} ranks, the '
                             f'profile for {self.profile.ranks}')
        if configuration.stages > 1:
            parts = self.pipelines.parts(configuration)
        elif configuration.overlap and configuration.replicas > 1:
            parts = self._overlapped(configuration)
        else:
            parts = self._in_a_row(configuration)
        return StepPrediction(
            Figure(sum(parts.values()), self._spread(configuration, parts)),
            parts)

    def least_seconds(self, configuration: Configuration) -> float:
        """Seconds that the step does not fall below, found quickly.

        Of replicas without overlap, passes and update alone; with overlap,
        what the busiest link, and a rank with its exchange's thread, need.
        Of a pipeline, all but the exchange.
        """
        model = self.profile.model
        beside = (0.0 if configuration.replicas == 1
                  else self._beside_exchange(configuration))
        if configuration.cut is not None:
            return self.pipelines.least_seconds(configuration) + beside
        computes = (self.costs.plain(self.batch / configuration.replicas
                                     ).seconds
                    + model.update.value + model.rest.value)
        least = together(self.profile, computes)
        if configuration.overlap and configuration.replicas > 1:
            time = self._exchange_time(configuration)
            # A rank and its thread both compute, at half of this speed.
            _, cores = doubled(self.profile.network.cluster(),
                               self.profile.cores)
            shared = max(cores.slowdown(pool, size) / 2
                         for pool, size in Counter(cores.pools).items())
            least = max(least, _SURE * time.link,
                        shared * (computes + _SURE * time.rank))
        return least + beside

    def _in_a_row(self, configuration: Configuration) -> dict[str, float]:
        """Passes, exchange and update, one after the other."""
        profile = self.profile
        passes = self.costs.plain(self.batch / configuration.replicas)
        return {'forward and backward': together(profile, passes.seconds),
                'exchange': self._exchange(configuration),
                'update': together(profile, profile.model.update.value),
                'other': together(profile, profile.model.rest.value)}

    def _exchange(self, configuration: Configuration) -> float:
        if configuration.replicas == 1:
            return 0.0
        return (self._exchange_time(configuration).seconds
                + self._beside_exchange(configuration))

    def _exchange_time(self, configuration: Configuration) -> ExchangeTime:
        """Of all gradients, while no rank computes."""
        exchange = self._exchanges.of(configuration)
        return exchange.seconds(exchange.by_hosts(),
                                self.profile.model.elements)

    def _beside_exchange(self, configuration: Configuration) -> float:
        return self._exchanges.of(configuration).seconds_beside(
            configuration.stages)

    def _overlapped(self, configuration: Configuration) -> dict[str, float]:
        """Buckets leave while the backward pass goes on."""
        profile = self.profile
        passes = self.costs.plain(self.batch / configuration.replicas)
        seconds = OverlapRun(
            profile, self._exchanges.of(configuration), passes,
            configuration.overlap == 'next_forward').run()
        seconds += self._beside_exchange(configuration)
        parts = {'forward and backward': together(profile, passes.seconds),
                 'update': together(profile, profile.model.update.value),
                 'other': together(profile, profile.model.rest.value)}
        parts['exchange'] = max(seconds - sum(parts.values()), 0.0)
        return parts

    def _spread(self, configuration: Configuration,
                parts: Mapping[str, float]) -> float:
        """Relative spread of the whole: parts vary independently."""
        profile = self.profile
        network = profile.network
        wire = (network.rate if network.between_hosts
                else network.local_rate).spread
        codec = (profile.codecs[configuration.codec].update.spread
                 if configuration.codec in profile.codecs else 0.0)
        spreads = {'exchange': max(wire, 0.0), 'other': codec,
                   'update': profile.model.update.spread,
                   'forward and backward': profile.model.spread,
                   'waiting for stages': profile.model.spread}
        total = sum(parts.values())
        return math.sqrt(sum((seconds * spreads[name]) ** 2 for name, seconds
                             in parts.items())) / total if total else 0.0
