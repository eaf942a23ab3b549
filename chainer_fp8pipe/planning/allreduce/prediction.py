"""Predicts the time of an all-reduce on a cluster of any size.

A chunk that is alone goes through the whole plan in the time of its longest
chain of messages.  The next one follows a step behind it, as soon as the
busiest link or rank of that step is free.  The frames in flight limit how many
are under way, and no link or rank is busy for longer than all the time::

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
from collections.abc import Sequence
from fractions import Fraction

from ..cluster import Cluster
from .codec_costs import CodecCosts
from .demand import Demand, Half
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
        cluster: Every rank has a host of its own, even if ``hosts`` is
            empty.
        codec: Bytes and rates of the elements.
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
    links = max(sum(lane.links[dimension] for lane in lanes)
                for dimension in (0, 1))
    rank = sum(lane.rank for lane in lanes)
    load = max(links, rank)
    rounds, more = divmod(chunks - 1, frames_in_flight)
    chains = (1 + rounds) * alone + more * max(lane.stagger for lane in lanes)
    steps = max(need.steps for need in demands)
    seconds = max(chains, chunks * load
                  + max(alone - load, 0.0) / max(steps, 1))
    return Timing(seconds, chunks * links, chunks * rank)


def total_seconds(timing: Timing, codec: CodecCosts, elements: int) -> float:
    """Adds encoding before and decoding after the exchange to its seconds.

    Where the codec works frame by frame, the timing has both already.
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
        self.links: dict[int, float] = collections.defaultdict(float)
        first, last = (self._shared(self._elements * seconds)
                       for seconds in (codec.first, codec.last))
        self.rank = self.alone = first + last
        self.alone += need.steps * cluster.latency
        self.stagger = 0.0
        for half in need.halves:
            busy, on_link = self._busy(half), 0.0
            for (dimension, form), traffic in half.flows.items():
                seconds = self._bytes(form, traffic) / cluster.rate
                self.links[dimension if cluster.torus else 0] += seconds
                on_link += seconds
            self.rank += busy
            self.stagger = max(self.stagger, max(on_link, busy)
                               / max(need.steps / 2, 1))
            # Of the messages of one step, one crosses the link while the rank
            # is busy with another.
            messages = sum(traffic.messages for traffic in half.flows.values())
            serial = min(1.0, need.steps / 2 / messages) if messages else 1.0
            self.alone += max(on_link, busy) + serial * min(on_link, busy)

    def _busy(self, half: Half) -> float:
        """Seconds for which a rank is busy in one half of the plan."""
        cluster, codec = self._cluster, self._codec
        seconds = (self._of(half.own) / codec.add_own
                   + self._of(half.encoded) / codec.mean)
        for (_, form), traffic in half.flows.items():
            elements = self._of(traffic.elements)
            seconds += 2 * (traffic.messages * cluster.message_cost
                            + self._bytes(form, traffic) * cluster.byte_cost)
            if form is MessageForm.PARTIAL:
                seconds += elements / codec.pack + elements / codec.add_partial
            elif form is MessageForm.CONTRIBUTION:
                seconds += elements / codec.add
        return self._shared(seconds)

    def _shared(self, seconds: float) -> float:
        """Seconds become more where ranks have to share cores."""
        return seconds * max(1.0, self._cluster.sharing / self._cluster.cores)

    def _bytes(self, form: MessageForm, traffic: Traffic) -> float:
        return self._of(traffic.elements) * self._codec.bytes_of(form)

    def _of(self, share: Fraction) -> float:
        return float(share) * self._elements
