"""Predicts the time of an all-reduce on a cluster of any size.

A chunk that is alone goes through the whole plan in the time of its longest
chain of messages.  The next one follows a step behind it, as soon as the
busiest link or rank of that step is free.  There is a limit to how many are
under way; and no link or rank can be busy for longer than all the time::

    alone   = steps * latency + seconds on links and in ranks
    stagger = seconds on the busiest link, or in a rank, for one step
    load    = seconds on the busiest link, or in a rank, for all steps
    chains  = (1 + rounds) * alone + more * stagger
    time    = max(chains, chunks * load + (alone - load) / steps)

where ``chunks - 1`` is ``rounds`` times the frames in flight and ``more``.
:mod:`.simulation` knows each message, and is what this is tested against.
"""
from __future__ import annotations

import collections
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction

from ..cluster import Cluster
from .codec_costs import CodecCosts
from .demand import Demand, Flows, Half
from .simulation import Timing
from .traffic import MessageForm, Traffic


def estimate(demands: Sequence[Demand], cluster: Cluster, codec: CodecCosts,
             elements: int, *, frame_bytes: int,
             frames_in_flight: int) -> Timing:
    """Predicts the time of an exchange from what its plans need.

    On a torus, messages must go between neighbours.  Several links of a
    rank count by dimension there.

    Args:
        demands: Of plans that run side by side, each on an equal share of
            the vector.
        cluster: Only its numbers count; every rank has a host of its own,
            even if ``hosts`` is empty.
        codec: What is sent and what it costs.
        elements: Of the vector.
        frame_bytes: Bytes of a frame on the wire.
        frames_in_flight: Chunks of a plan that are under way at a time.

    Raises:
        ValueError: Ranks share a host.
    """
    if len(set(cluster.hosts)) < len(cluster.hosts):
        raise ValueError('ranks that share a host must be simulated')
    frame = max(1, frame_bytes // codec.wire_bytes)
    if not elements:
        return Timing(0.0, 0.0, 0.0)
    share = elements / len(demands)
    lanes = [_Lane(need, cluster, codec, share, frame) for need in demands]
    chunks = max(lane.chunks for lane in lanes)
    alone = max(lane.alone for lane in lanes)
    links = _busiest([lane.links for lane in lanes])
    rank = sum(lane.rank for lane in lanes)
    load = max(links, rank)
    rounds, more = divmod(chunks - 1, frames_in_flight)
    chains = (1 + rounds) * alone + more * max(lane.stagger for lane in lanes)
    steps = max(need.steps for need in demands)
    seconds = max(chains, chunks * load
                  + max(alone - load, 0.0) / max(steps, 1))
    return Timing(seconds, chunks * links, chunks * rank)


def total_seconds(timing: Timing, codec: CodecCosts, elements: int) -> float:
    """Adds encoding before and decoding after the exchange.

    Where the codec works frame by frame, both are in the timing already.

    Args:
        timing: Of the exchange.
        codec: Whose rates count.
        elements: Of the vector.
    """
    if codec.by_frame:
        return timing.seconds
    return (timing.seconds + elements / codec.encode
            + elements / codec.decode)


class _Lane:
    """A plan's chunk of full size.

    Attributes:
        chunks: How many there are; the last one may be a part.
        alone: Seconds of one chunk, the others not being there.
        stagger: Seconds by which the next chunk is behind.
        links: For how long a chunk keeps each link of a rank busy.
        rank: For how long a chunk keeps a rank busy.
    """

    def __init__(self, need: Demand, cluster: Cluster, codec: CodecCosts,
                 elements: float, frame: int) -> None:
        self._cluster, self._codec = cluster, codec
        self.chunks = max(1.0, elements / need.blocks / frame)
        self._elements = elements / self.chunks
        self.links = self._links(need)
        first, last = (self._shared(self._elements * seconds)
                       for seconds in (codec.first, codec.last))
        self.rank = sum(map(self._busy, need.halves), first + last)
        self.alone = first + last + need.steps * cluster.latency + sum(
            self._chain(half, need.steps / 2) for half in need.halves)
        self.stagger = max(
            max(self._crossing(half.sent), self._crossing(half.received),
                self._busy(half)) / max(need.steps / 2, 1)
            for half in need.halves)

    def _chain(self, half: Half, steps: float) -> float:
        """One half of the plan, without latencies.

        Of the messages of one step, one crosses the link while the rank is
        busy with another.
        """
        on_link = max(self._crossing(half.sent), self._crossing(half.received))
        busy = self._busy(half)
        messages = max(_messages(half.sent), _messages(half.received))
        alone = min(1.0, steps / messages) if messages else 1.0
        return max(on_link, busy) + alone * min(on_link, busy)

    def _crossing(self, flows: Flows) -> float:
        return sum(self._bytes(form, traffic) for (_, form), traffic
                   in flows.items()) / self._cluster.rate

    def _links(self, need: Demand) -> dict[Hashable, float]:
        seconds: dict[Hashable, float] = collections.defaultdict(float)
        for half in need.halves:
            for way, flows in ('out', half.sent), ('in', half.received):
                for (dimension, form), traffic in flows.items():
                    link = way, dimension if self._cluster.torus else 0
                    seconds[link] += (self._bytes(form, traffic)
                                      / self._cluster.rate)
        return seconds

    def _busy(self, half: Half) -> float:
        """Seconds for which a rank is busy in one half of the plan."""
        cluster, codec = self._cluster, self._codec
        seconds = 0.0
        for flows in half.sent, half.received:
            for (_, form), traffic in flows.items():
                seconds += (traffic.messages * cluster.message_cost
                            + self._bytes(form, traffic) * cluster.byte_cost)
        for (_, form), traffic in half.sent.items():
            if form is MessageForm.PARTIAL:
                seconds += self._of(traffic.elements) / codec.pack
        for (_, form), traffic in half.received.items():
            if form is not MessageForm.RESULT:
                seconds += self._of(traffic.elements) / (
                    codec.add_partial if form is MessageForm.PARTIAL
                    else codec.add)
        seconds += (self._of(half.own) / codec.add_own
                    + self._of(half.encoded) / codec.mean)
        return self._shared(seconds)

    def _shared(self, seconds: float) -> float:
        """Seconds become more where ranks have to share cores."""
        return seconds * max(1.0, self._cluster.sharing / self._cluster.cores)

    def _bytes(self, form: MessageForm, traffic: Traffic) -> float:
        return self._of(traffic.elements) * self._codec.bytes_of(form)

    def _of(self, share: Fraction) -> float:
        return float(share) * self._elements


def _messages(flows: Flows) -> int:
    return sum(traffic.messages for traffic in flows.values())


def _busiest(lanes: Sequence[Mapping[Hashable, float]]) -> float:
    """Seconds for which the busiest link is busy with all lanes' loads."""
    total: dict[Hashable, float] = collections.defaultdict(float)
    for links in lanes:
        for link, seconds in links.items():
            total[link] += seconds
    return max(total.values(), default=0.0)
