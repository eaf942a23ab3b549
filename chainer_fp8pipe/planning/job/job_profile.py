"""What was measured of a job's links, cores, codecs and model: pure data."""
from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..cluster import Cluster
from ..cores import Cores
from ..partition.calls import Call, Parameter

#: The share of the heap that is taken to be so where nothing was measured.
USUAL_HEAP = 0.1


class Figure(NamedTuple):
    """A figure that was measured several times.

    Attributes:
        value: The median.
        spread: Half of the distance between the quartiles, relative to the
            median.
    """

    value: float
    spread: float = 0.0

    @classmethod
    def of(cls, found: Iterable[float]) -> Figure:
        """The figure of all values found, one or more."""
        values = sorted(found)
        median = statistics.median(values)
        if len(values) < 2 or not median:
            return cls(median)
        low, _, high = statistics.quantiles(values, n=4, method='inclusive')
        return cls(median, (high - low) / 2 / abs(median))


@dataclass(frozen=True)
class NetworkFigures:
    """The links between the ranks of a job.

    Attributes:
        hosts: For each rank, the number of its host.
        latency: Seconds of a short message from one host to another.
        rate: Bytes per second of a host's port and direction, while the
            other direction is as busy.
        trunk: Bytes per second of all messages between hosts together, if
            they share something slower than their ports; None: they do not.
        burst: Bytes that a port which was idle passes at once.
        local_latency: Seconds of a short message between ranks of a host.
        local_rate: Bytes per second between two ranks of a host.
        message_cost: Seconds for which a rank is busy with a message, at
            either end.
        byte_cost: Likewise with each byte of a message.
        torus: Rows and columns, if hosts are wired as a torus.
        remarks: What users should know, such as a link that is slower than
            the others.
    """

    hosts: tuple[int, ...]
    latency: Figure = Figure(0.0)
    rate: Figure = Figure(float('inf'))
    trunk: Figure | None = None
    burst: float = 0.0
    local_latency: Figure = Figure(0.0)
    local_rate: Figure = Figure(float('inf'))
    message_cost: Figure = Figure(0.0)
    byte_cost: Figure = Figure(0.0)
    torus: tuple[int, int] | None = None
    remarks: tuple[str, ...] = ()

    @property
    def between_hosts(self) -> bool:
        """Whether messages leave a host."""
        return len(set(self.hosts)) > 1

    def cluster(self) -> Cluster:
        """The links for the engine; what cores do is not in it."""
        return Cluster(
            self.hosts, self.rate.value, self.latency.value, self.torus,
            self.message_cost.value, self.byte_cost.value,
            self.local_rate.value, self.local_latency.value,
            burst=self.burst,
            trunk=self.trunk.value if self.trunk else float('inf'))


@dataclass(frozen=True)
class CodecFigures:
    """What one rank does with a codec while all ranks work.

    Attributes:
        rates: Elements per second of processor time, by operation:
            ``encode`` (gradients to wire), ``decode`` (wire to gradients),
            ``accumulate`` (a contribution into float32 sums), ``add`` (wire
            into wire, in the wire's format), ``add_partial`` and ``pack``
            (sums that travel in float16, received and sent), ``mean`` (sums
            to wire).
        update: Seconds of the mean of a few elements of one tensor:
            agreement, waking up, Python.
        tensor: Seconds that each further tensor adds.
        bucket: Seconds that each further bucket adds, into which gradients
            are divided.
    """

    rates: Mapping[str, Figure]
    update: Figure = Figure(0.0)
    tensor: Figure = Figure(0.0)
    bucket: Figure = Figure(0.0)


@dataclass(frozen=True)
class ModelFigures:
    """The model's calls for two sizes of a batch, and what else takes time.

    Seconds of calls are those of the processor, of a rank that computes
    alone, in training.

    Attributes:
        samples: Of the larger batch.
        calls: Of a trace with so many samples.
        few: Samples of the smaller batch; equal to ``samples`` if only one
            was measured.
        calls_few: Of a trace with these.
        order: The model's parameters in groups, in the order of first use.
        parameters: By path.
        buckets: Paths of the parameters whose gradients travel together, in
            the order in which they are sent.
        update: Seconds in which the optimizer updates all parameters.
        rest: Seconds of an update beside passes, exchange and optimizer.
        plain: Seconds of a whole forward and backward pass of ``samples`` by
            plain Chainer, as replicas without a pipeline run the model.
        plain_few: The same of the smaller batch.
        spread: Relative spread of these.
        ghost: Seconds in which a stage passes by a call of another stage.
        step: Seconds that a step of a pipeline takes beside its passes.
        micro_batch: Seconds that each of its micro-batches adds.
        optimizer_arrays: Arrays of a parameter's size that the optimizer
            keeps.
        heap: Bytes that the heap takes between the arrays of a pass, as a
            share of these.
        update_temporary: Bytes that an update of a parameter takes for a
            while, as a multiple of the parameter's.
        sample_bytes: Of a sample of the batch, which all stages get.
        undivided: Why the model cannot be cut, so that ``calls`` are made
            up, one for each layer; '': it can.
    """

    samples: int
    calls: tuple[Call, ...]
    few: int
    calls_few: tuple[Call, ...]
    order: tuple[tuple[str, ...], ...]
    parameters: Mapping[str, Parameter]
    buckets: tuple[tuple[str, ...], ...]
    update: Figure
    rest: Figure = Figure(0.0)
    plain: tuple[float, float] = (0.0, 0.0)
    plain_few: tuple[float, float] = (0.0, 0.0)
    spread: float = 0.0
    ghost: Figure = Figure(8e-6)
    step: Figure = Figure(0.0)
    micro_batch: Figure = Figure(0.0)
    optimizer_arrays: int = 2
    heap: float = 0.0
    update_temporary: float = 0.0
    sample_bytes: float = 0.0
    undivided: str = ''

    def elements_of(self, names: Iterable[str]) -> int:
        """Elements of these parameters, as far as shapes are known.

        Names of an order that are no parameters, but layers, have none.
        """
        return sum(self.parameters[name].nbytes
                   // self.parameters[name].dtype.itemsize
                   for name in names if name in self.parameters)

    @property
    def elements(self) -> int:
        """Elements of all parameters."""
        return self.elements_of(self.parameters)

    def slower(self, passes: float, updates: float) -> ModelFigures:
        """The figures of a slower processor.

        Args:
            passes: How many times as long all passes take.
            updates: How many times as long an update takes.
        """
        def times(figure: Figure, factor: float = passes) -> Figure:
            return figure._replace(value=figure.value * factor)

        def calls(of: Iterable[Call]) -> tuple[Call, ...]:
            return tuple(dataclasses.replace(
                call, forward=call.forward * passes,
                backward=call.backward * passes) for call in of)
        forward, backward = self.plain
        forward_few, backward_few = self.plain_few
        return dataclasses.replace(
            self, calls=calls(self.calls), calls_few=calls(self.calls_few),
            plain=(forward * passes, backward * passes),
            plain_few=(forward_few * passes, backward_few * passes),
            step=times(self.step), micro_batch=times(self.micro_batch),
            update=times(self.update, updates))


@dataclass(frozen=True)
class JobProfile:
    """All that was measured of a job.

    Attributes:
        network: Between the ranks.
        cores: How much ranks slow each other down.
        codecs: By the communicator's name.
        model: The model.
        speeds: For each rank, how many times as long as the median it takes
            for the same computation, if it is slow, else 1.0; empty: all
            alike.
        straggling: How many times as long as the mean the rank takes that is
            last, another one each time.
        overhead: Bytes of each rank beyond the interpreter's, whatever the
            rank computes.
    """

    network: NetworkFigures
    cores: Cores
    codecs: Mapping[str, CodecFigures]
    model: ModelFigures
    speeds: tuple[float, ...] = ()
    overhead: float = 16e6
    remarks: tuple[str, ...] = field(default=())
    straggling: float = 1.0

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.network.hosts)

    def for_ranks(self, count: int) -> JobProfile:
        """The profile of a job with another number of ranks.

        Hosts go on as they began: as many ranks on each, and as many cores.
        """
        if count == self.ranks:
            return self
        hosts, pools = self.network.hosts, self.cores.pools
        each = max(hosts.count(host) for host in set(hosts))
        single_host = len(set(hosts)) == 1
        new_hosts = tuple(
            0 if single_host else rank // each for rank in range(count))
        # The pools of a host's ranks, one after the other.
        local = [pool for pool, host in zip(pools, hosts, strict=True)
                 if host == hosts[0]]
        names = list(dict.fromkeys(local))
        new_pools = (0,) * count if len(set(pools)) == 1 else tuple(
            host * len(names) + names.index(local[rank % len(local)])
            for rank, host in enumerate(new_hosts))
        # Twice the ranks on as many cores take twice as long.
        each_full = (statistics.mean(self.cores.full or (1.0,))
                     * len(set(pools)) / len(pools))
        sizes = Counter(new_pools)
        cores = Cores(new_pools, self.cores.single, tuple(
            max(each_full * sizes[pool], 1.0)
            for pool in range(max(sizes) + 1)))
        return dataclasses.replace(
            self, network=dataclasses.replace(self.network, hosts=new_hosts),
            cores=cores, speeds=(), straggling=self._straggling_of(count))

    def on(self, hosts: int, rate: float, latency: float = 50e-6
           ) -> JobProfile:
        """The profile of a job with a rank on each of so many hosts.

        Each rank has a core of its own; links are as given.

        Args:
            hosts: How many.
            rate: Of a link, bytes per second and direction.
            latency: Of a message, in seconds.
        """
        each: Any = tuple(range(hosts))
        return dataclasses.replace(
            self, speeds=(), cores=Cores(each, self.cores.single),
            straggling=self._straggling_of(hosts),
            network=dataclasses.replace(
                self.network, hosts=each, latency=Figure(latency),
                rate=Figure(rate), trunk=None, torus=None, remarks=()))

    def _straggling_of(self, count: int) -> float:
        """Of so many ranks, if each is late by chance and on its own.

        The largest of n normal deviates is some z(n) standard deviations
        above the mean; z after Blom, Statistical Estimates and Transformed
        Beta-Variables, 1958.
        """
        def largest(ranks: int) -> float:
            return statistics.NormalDist().inv_cdf(
                (ranks - 0.375) / (ranks + 0.25))
        if self.ranks == 1 or count == 1:
            return 1.0
        return 1 + (self.straggling - 1) * largest(count) / largest(
            self.ranks)
