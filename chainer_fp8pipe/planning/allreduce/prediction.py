"""Predicts the time of an all-reduce on a cluster of any size.

The time is the longest of three:

* the load of the busiest link or rank, and until it begins;
* chains: a chunk that is alone goes through the whole plan in the time of its
  longest chain of messages (:mod:`.chunk_seconds`), and the frames in flight
  limit how many are under way::

      chains = (1 + rounds) * alone + more * stagger

  where ``chunks - 1`` is ``rounds`` times the frames in flight and ``more``;
* as many chunks as may be in flight go side by side, phase by phase.  In one
  phase links or ranks are busiest, in another all chunks wait::

      together = sum over phases of max(alone, loads of all chunks) + means

  The other chunks take the load of what is busiest, and on long chains more.

:mod:`.simulation` knows each message, and is what this is tested against.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from ..cluster import Cluster
from .chunk_seconds import RANK, SERVER, ChunkSeconds, Loads, summed
from .codec_costs import CodecCosts
from .demand import Demand
from .simulation import Timing

#: Steps of a chain on which chunks do not stay side by side.
_SHORT = 4


def estimate(demands: Sequence[Demand], cluster: Cluster, codec: CodecCosts,
             elements: int, *, frame_bytes: float,
             frames_in_flight: int) -> Timing:
    """Predicts the time of an exchange from what its plans need.

    On a torus, messages must go between neighbours.  Several links of a
    rank count by dimension there.

    Args:
        demands: Of plans that run side by side, each on an equal share of
            the vector.
        cluster: Every rank has a host of its own, even if ``hosts`` is
            empty; aggregators are in the switch if any host is.
        codec: Bytes and rates of the elements.
        elements: Of the vector.
        frame_bytes: Bytes of a frame on the wire.
        frames_in_flight: Chunks of a plan that are under way at a time.

    Raises:
        ValueError: Ranks share a host.
    """
    if len(set(cluster.hosts)) < len(cluster.hosts):
        raise ValueError('ranks that share a host must be simulated')
    if not elements:
        return Timing(0.0, 0.0, 0.0)
    frame = codec.frame(frame_bytes)
    lanes = [_Lane(need, cluster, codec, elements / len(demands), frame)
             for need in demands]
    loads = summed((1, lane.loads(lane.count)) for lane in lanes)
    seconds = max(_busiest(lanes, loads), _chains(lanes, frames_in_flight))
    if not any(need.served for need in demands):
        seconds = max(seconds, _side_by_side(lanes, frames_in_flight))
    ranks = max(loads.pop(name, 0.0) for name in (RANK, SERVER))
    return Timing(seconds, max(loads.values()), ranks)


def total_seconds(timing: Timing, codec: CodecCosts, elements: int) -> float:
    """Adds encoding before and decoding after the exchange to its seconds.

    Where the codec works frame by frame, the timing has both already.
    """
    if codec.by_frame:
        return timing.seconds
    return (timing.seconds + elements / codec.encode
            + elements / codec.decode)


class _Lane:
    """A plan's chunks, of which the last one may be smaller.

    Attributes:
        size: Of all chunks, in full ones.
        count: How many there are.
        full: The first one.
        last: The last one.
    """

    def __init__(self, need: Demand, cluster: Cluster, codec: CodecCosts,
                 elements: float, frame: int) -> None:
        longest = elements / need.blocks
        self.size = longest / frame
        self.count = max(math.ceil(self.size - 1e-9), 1)
        rest = longest - (self.count - 1) * frame
        self.full, self.last = (
            ChunkSeconds(need, cluster, codec, block * need.blocks)
            for block in (min(longest, frame), rest))

    def chunks(self, stop: int) -> list[ChunkSeconds]:
        """The first ones."""
        full = min(stop, self.count - 1)
        return [self.full] * full + [self.last] * (stop >= self.count)

    def loads(self, stop: int, start: int = 0) -> Loads:
        """What the chunks from one to another keep busy."""
        full = max(min(stop, self.count - 1) - start, 0)
        return summed([(full, self.full.loads),
                       (start < self.count <= stop, self.last.loads)])

    def chains(self, flight: int) -> float:
        """Seconds of the longest chain of messages."""
        rounds, more = divmod(self.count - 1, flight)
        if not more:
            return rounds * self.full.alone + self.last.alone
        return ((1 + rounds) * self.full.alone
                + (more - 1) * self.full.stagger + self.last.stagger)


def _busiest(lanes: Sequence[_Lane], loads: Loads) -> float:
    """Seconds in which the busiest link or rank begins and does its work."""
    begin = max((lane.full.alone - max(lane.full.loads.values()))
                / max(lane.full.steps, 1) for lane in lanes)
    return max(loads.values()) + max(begin, 0.0)


def _chains(lanes: Sequence[_Lane], flight: int) -> float:
    """Seconds of the longest chains; a plan's are behind another plan's."""
    return max(lane.chains(flight) for lane in lanes) + sum(
        _behind(lanes[0].full, lane.full) for lane in lanes[1:])


def _behind(one: ChunkSeconds, other: ChunkSeconds) -> float:
    """Seconds that a step waits for a link or rank that both need."""
    return max(busy for first, phase in zip(one.phases, other.phases,
                                            strict=True)
               for key, busy in phase.loads.items() if key in first.loads)


def _side_by_side(lanes: Sequence[_Lane], flight: int) -> float:
    """Seconds of as many chunks as there may be, and of the others.

    After the first ones, chunks begin when others end.  For all that they
    stay side by side, by a share of which is read off simulations: the longer
    the chain, and the less of what is busiest is used without.
    """
    count = max(lane.count for lane in lanes)
    flight = min(flight, count)
    first = _together([chunk for lane in lanes
                       for chunk in lane.chunks(flight)])
    left = max(summed((1, lane.loads(count, flight))
                      for lane in lanes).values())
    chunks = max(lane.size for lane in lanes)
    still = max(first * (chunks - flight) / flight - left, 0.0)
    seconds = first + left + still * _share(lanes, flight)
    if flight < count <= 2 * flight:
        # The last chunk begins when one of the first ends.
        ends = first - (2 * flight - count) * sum(
            lane.full.stagger for lane in lanes)
        return max(seconds, ends + max(lane.last.alone for lane in lanes))
    return seconds


def _share(lanes: Sequence[_Lane], flight: int) -> float:
    """By how much later chunks stay side by side, from 0 to 1."""
    steps = max(lane.full.steps for lane in lanes)
    load = max(summed((1, lane.full.loads) for lane in lanes).values())
    alone = max(lane.full.alone for lane in lanes)
    waiting = alone / (flight * load) if alone < flight * load else 1.0
    return max((steps - _SHORT) / (steps + _SHORT),
               waiting ** 2 * steps / (steps + 6))


def _together(chunks: Sequence[ChunkSeconds]) -> float:
    """Seconds of chunks that go through their phases side by side.

    Chunks that wait for the same link or rank are behind each other by a part
    of a step.  Meanwhile those ahead encode their means, begin the next phase
    if that needs something else, or decode.
    """
    seconds = sum(chunk.encoding for chunk in chunks)
    ahead = (len(chunks) - 1) / len(chunks)
    before: Loads = {}
    free = 0.0
    for phases in zip(*(chunk.phases for chunk in chunks), strict=True):
        steps = max(*(phase.steps for phase in phases), 1)
        step = summed((phase.steps / steps, phase.loads) for phase in phases)
        alone = max(phase.steps * phase.alone / steps for phase in phases)
        busiest = max(step.values())
        seconds += steps * max(alone, busiest)
        means = [phase.means for phase in phases]
        if busiest > alone:
            seconds -= ahead * _overlap(before, step)
            free = ahead * (busiest - step[RANK])
            before = summed([(1, step), (1, {RANK: sum(means)})])
        else:
            free, before = 0.0, {}
        hidden = min(free, sum(means) - max(means))
        seconds += sum(means) - hidden
        free -= hidden
    decoding = [chunk.decoding for chunk in chunks]
    return seconds + max(sum(decoding) - free, max(decoding))


def _overlap(one: Loads, other: Loads) -> float:
    """Seconds for which two steps go on at the same time at most."""
    first, second = (max(loads.values(), default=0.0)
                     for loads in (one, other))
    both = summed([(1, one), (1, other)])
    return first + second - max(first, second, *both.values())
