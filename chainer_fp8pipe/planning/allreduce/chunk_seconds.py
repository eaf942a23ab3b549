"""What a chunk of an all-reduce takes, and what the chunk keeps busy.

In a step a rank sends k messages, for s seconds each, and receives as many,
for r seconds each, of which one is on the wire for w seconds::

    first arrival = s + w + latency
    last arrival  = first arrival + (k - 1) * max(s, w)
    step          = max(max(k * s + e, first arrival) + a + k * r,
                        last arrival + r)

where e and a are the seconds in which the rank encodes and adds its own
contribution.
"""
from __future__ import annotations

from collections.abc import Hashable, Iterable
from fractions import Fraction
from typing import NamedTuple

from ..cluster import Cluster
from .codec_costs import CodecCosts
from .demand import Demand, Phase
from .traffic import MessageForm

#: Seconds for which links and ranks are busy.  Links are named by their
#: dimension, or by their side of the aggregators.
Loads = dict[Hashable, float]

RANK, SERVER = 'rank', 'server'


def summed(several: Iterable[tuple[float, Loads]]) -> Loads:
    """The sum of loads, each of them so many times."""
    total: Loads = {}
    for times, loads in several:
        for key, busy in loads.items():
            total[key] = total.get(key, 0.0) + times * busy
    return total


class PhaseSeconds(NamedTuple):
    """A phase of one chunk.

    Attributes:
        steps: How many, one after the other.
        alone: Seconds of a step if no other chunk is there.
        loads: What a step keeps busy.
        means: Seconds in which means are encoded after the last step.
    """

    steps: int
    alone: float
    loads: Loads
    means: float


class ChunkSeconds:
    """A chunk.

    Args:
        need: What the plan needs of a rank.
        cluster: Whose links and ranks are busy.
        codec: Bytes and rates of the elements.
        elements: Of the chunk, in all blocks.

    Attributes:
        phases: Of the reduce-scatter, then of the all-gather.
        encoding: Seconds before the first phase.
        decoding: Seconds after the last one.
        steps: In the longest chain of messages.
        alone: Seconds of the chunk, no other being there.
        loads: What the chunk keeps busy.
        stagger: Seconds by which the next chunk is behind.
    """

    def __init__(self, need: Demand, cluster: Cluster, codec: CodecCosts,
                 elements: float) -> None:
        self._cluster, self._codec = cluster, codec
        self._elements = elements
        self._encoded = 0.0     # by the steps that first need something
        self.steps = need.steps
        self._adds = SERVER if need.served else RANK
        self.phases = [self._phase(phase)
                       for phase in (*need.reduce, *need.gather)]
        self.encoding = self._shared(max(
            elements * codec.first - self._encoded, 0.0))
        self.decoding = self._shared(elements * codec.last)
        means = sum(phase.means for phase in self.phases)
        self.alone = self.encoding + means + self.decoding + sum(
            phase.steps * phase.alone for phase in self.phases)
        self.loads = summed([
            *((phase.steps, phase.loads) for phase in self.phases),
            (1, {self._adds: means}),
            (1, {RANK: self.encoding + self.decoding})])
        self.stagger = max((max(phase.loads.values())
                            for phase in self.phases if phase.steps),
                           default=0.0)

    def _phase(self, phase: Phase) -> PhaseSeconds:
        alone, loads = (self._step(phase) if self._adds == RANK
                        else self._served(phase))
        return PhaseSeconds(
            phase.steps, alone, loads,
            self._shared(self._of(phase.mean) / self._codec.mean))

    def _step(self, phase: Phase) -> tuple[float, Loads]:
        """A step of ranks that send and receive."""
        send, wire, receive = self._message(phase)
        own, count = self._of(phase.own), phase.messages
        early = (self._shared(self._encode(own, phase.steps))
                 if phase.fresh else 0.0)
        added = self._shared(own / self._codec.add_own)
        first = send + wire + self._cluster.latency
        last = first + (count - 1) * max(send, wire)
        seconds = max(max(count * send + early, first) + added
                      + count * receive, last + receive)
        return seconds, {
            RANK: count * (send + receive) + early + added,
            phase.dimension if self._cluster.torus else 0: count * wire}

    def _served(self, phase: Phase) -> tuple[float, Loads]:
        """A step from ranks to those that sum for them, or back."""
        send, wire, receive = self._message(phase)
        back = phase.form is MessageForm.RESULT
        # A server that is in the switch has no port.
        port = 0.0 if self._cluster.in_switch else wire
        out, into = (port, wire) if back else (wire, port)
        arrival = send + wire + self._cluster.latency
        sent = (phase.messages - 1) * max(send, out)
        if back:    # All send to the first worker first.
            first, last = arrival, arrival + sent + (phase.received - 1) * into
        else:       # Each waits for the first worker first.
            first, last = arrival + sent, arrival + max(
                sent, (phase.received - 1) * into)
        seconds = max(first + phase.received * receive, last + receive)
        sender, receiver = (SERVER, RANK) if back else (RANK, SERVER)
        return seconds, {
            sender: phase.messages * send,
            receiver: phase.received * receive,
            ('to', receiver): max(phase.messages * out,
                                  phase.received * into)}

    def _message(self, phase: Phase) -> tuple[float, float, float]:
        """Seconds of a message in the sender, on a link, in the receiver."""
        codec, cluster = self._codec, self._cluster
        elements = self._of(phase.share)
        size = elements * codec.bytes_of(phase.form)
        send = receive = cluster.message_cost + size * cluster.byte_cost
        if phase.form is MessageForm.CONTRIBUTION:
            if phase.fresh:
                send += self._encode(elements, phase.steps * phase.messages)
            receive += elements / codec.add
        elif phase.form is MessageForm.PARTIAL:
            send += elements / codec.pack
            receive += elements / codec.add_partial
        return self._shared(send), size / cluster.rate, self._shared(receive)

    def _encode(self, elements: float, times: int) -> float:
        """Seconds of encoding, which is done so many times."""
        seconds = elements * self._codec.first
        self._encoded += times * seconds
        return seconds

    def _shared(self, seconds: float) -> float:
        """Seconds become more where ranks have to share cores."""
        return seconds * max(1.0, self._cluster.sharing / self._cluster.cores)

    def _of(self, share: Fraction) -> float:
        return float(share) * self._elements
