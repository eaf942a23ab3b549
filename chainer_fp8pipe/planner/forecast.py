"""Predicts a job on hosts that are not there: one rank on each."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import chainer
import numpy
from mpi4py import MPI

from ..chains.valueless_parameters import without_shapes
from ..communicators.options import ExchangeOptions, make_options
from ..mpi.agreement import raise_together
from ..mpi.processors import core_numbers
from ..planning.cores import Cores
from ..planning.job.configuration import (
    CODECS,
    USUAL_CODECS,
    Configuration,
)
from ..planning.job.job_profile import Figure, JobProfile
from ..planning.job.step import StepModel, StepPrediction
from ..planning.partition.calls import Parameter
from .codec.codec_rates import measure_codecs
from .example import Example
from .model_figures import measure_model
from .network.links import measure_network
from .planned_job import profile_of

#: In which codecs, and what messages cost, are measured.
_SECONDS, _OF_LINKS = 3.0, 1.0
#: Algorithms and options of communicators that the prediction knows, and
#: options that change no time.
_ALGORITHMS = 'direct', 'ring', 'torus2d'
_KNOWN = 'shape', 'two_level', 'partial_sums', 'frame_bytes'
_TIMELESS = ('algorithm', 'overlap', 'warmup', 'quantile', 'epsilon',
             'headroom', 'seed', 'nonfinite')


class Forecast:
    """Steps of replicas, were each rank alone on a host, with nothing else.

    Model and codecs are measured here, on no more ranks than there are
    cores; links are as given.  Call it and its methods on all ranks.

    Args:
        comm: All ranks, mpi4py's: as many hosts.
        model: The whole model; it stays as it is.
        batch: Of one rank, as the converter gives it.
        rate: Bytes per second of a host's link, in each direction.
        latency: Seconds of a short message between hosts.
        optimizer: That will train the model; None: Adam.
        codecs: Names of the communicators that will be asked for.

    Attributes:
        hosts: How many there are.

    Raises:
        ValueError: The arrays of the batch are not of equally many samples;
            on all ranks.
        RuntimeError: The model or MPI has failed; on all ranks.
    """

    def __init__(self, comm: MPI.Comm, model: Any, batch: Any, *,
                 rate: float, latency: float = 50e-6, optimizer: Any = None,
                 codecs: Sequence[str] = USUAL_CODECS) -> None:
        example: Example = raise_together(comm, lambda: Example(batch),
                                          error=ValueError)
        self._comm, self.hosts = comm, comm.size
        self._batch, self._codecs = example.samples * comm.size, tuple(codecs)
        few = _few_ranks(comm)

        def measured() -> JobProfile | None:
            return _measured(
                model, few, example, optimizer or chainer.optimizers.Adam(),
                codecs) if few else None
        try:
            # They raise the same, so that the others may wait meanwhile.
            found = raise_together(comm, measured)
        finally:
            if few:
                few.Free()
        self._profile = (_apart(found, self.hosts, rate, latency)
                         if found else None)

    def step(self, name: str, **options: Any) -> StepPrediction | None:
        """An update with a communicator of this name and these options.

        Returns:
            Seconds; None where the prediction does not know how the
            communicator exchanges: ``MPI_Allreduce`` is up to the MPI
            library.

        Raises:
            ValueError: The codec was not measured.
        """
        configuration = _configuration(name, options, self.hosts)
        return self._predicted(configuration) if configuration else None

    def exchange(self, name: str, elements: int, tensors: int) -> float:
        """Seconds of the exchange of another model's gradients.

        Args:
            name: Of a communicator, with its default options.
            elements: Of all gradients.
            tensors: In so many parameters.

        Raises:
            ValueError: The prediction does not know the communicator, or
                the codec was not measured.
        """
        configuration = _configuration(name, {}, self.hosts)
        if configuration is None:
            raise ValueError(f'communicator {name!r} is not predicted; these '
                             f'are: {", ".join(CODECS)}')
        each = Parameter((elements // tensors,), numpy.dtype('float32'))
        return self._predicted(configuration, parameters={
            str(number): each for number in range(tensors)}).parts['exchange']

    def _predicted(self, configuration: Configuration, **model: Any
                   ) -> StepPrediction:
        """The first rank predicts, maybe of a model that differs in this."""
        if configuration.codec not in self._codecs:
            raise ValueError(
                f'codec {configuration.codec!r} was not measured; name it: '
                f'Forecast(..., codecs=({configuration.codec!r}, ...))')

        def predict() -> StepPrediction | None:
            if self._comm.rank:
                return None
            assert self._profile is not None    # the first rank measures
            return StepModel(dataclasses.replace(
                self._profile, model=dataclasses.replace(
                    self._profile.model, **model)), self._batch
            ).predict(configuration)
        return self._comm.bcast(raise_together(self._comm, predict))


def _few_ranks(comm: MPI.Comm) -> MPI.Comm | None:
    """Ranks of the first host, as many as cores; None on the others.

    At least two, if there are two: one alone would agree with nobody.
    """
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        with_first = host.bcast(comm.rank) == 0
        cores = len(set().union(*host.allgather(core_numbers())))
        chosen = with_first and host.rank < max(cores, 2)
    finally:
        host.Free()
    few = comm.Split(0 if chosen else MPI.UNDEFINED, comm.rank)
    return few if chosen else None


@without_shapes(always=True)
def _measured(model: Any, comm: MPI.Comm, example: Example, optimizer: Any,
              codecs: Sequence[str]) -> JobProfile:
    """What :func:`.planned_job.measure` does, in less time."""
    figures, sharing = measure_model(
        comm, model, example, optimizer, max(1, example.samples // 4), True)
    network = measure_network(comm, _OF_LINKS)
    rates = measure_codecs(comm, codecs, _SECONDS)
    sharing.visit()
    return profile_of(network, rates, figures, sharing)


def _apart(profile: JobProfile, hosts: int, rate: float, latency: float
           ) -> JobProfile:
    """The profile with a rank on each host."""
    # What ranks agree on before an exchange crosses the network, too.
    rounds = math.ceil(math.log2(hosts)) * latency
    apart = profile.on(hosts, rate, latency)
    return dataclasses.replace(
        apart, cores=Cores(apart.cores.pools), codecs={
            name: dataclasses.replace(figures, update=Figure(
                figures.update.value + rounds, figures.update.spread))
            for name, figures in apart.codecs.items()})


def _configuration(name: str, given: dict[str, Any], replicas: int
                   ) -> Configuration | None:
    """A communicator as plans have it; None: they do not."""
    if name not in CODECS:
        return None
    options: ExchangeOptions = make_options(name, given)
    if options.algorithm not in _ALGORITHMS or set(given) - {
            *_KNOWN, *_TIMELESS}:
        return None
    return Configuration(
        replicas, codec=name, algorithm=options.algorithm,
        overlap=options.overlap, options={
            option: value for option, value in given.items()
            if option in _KNOWN})
