"""What an all-reduce asks of a rank, for any number of ranks.

Plans of thousands of ranks are too large to be written down.  In the plans
here all ranks do the same, though: the demand of one rank says all.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from .traffic import NO_TRAFFIC, MessageForm, Traffic

#: Traffic by dimension of the network and form of the message.
Flows = Mapping[tuple[int, MessageForm], Traffic]


@dataclass(frozen=True)
class Half:
    """What a rank does in the reduce-scatter, or in the all-gather.

    Attributes:
        flows: Messages that leave the rank; as many reach the rank.
        own: Elements of the rank's own contribution that are added to
            sums, as a share of the vector.
        encoded: Elements whose mean the rank encodes, as a share of the
            vector; also where there is one contribution only.
    """

    flows: Flows = field(default_factory=dict)
    own: Fraction = Fraction(0)
    encoded: Fraction = Fraction(0)


@dataclass(frozen=True)
class Demand:
    """What an all-reduce needs of each rank.

    Attributes:
        blocks: Into how many the vector is cut.
        steps: Messages in the longest chain, half of them in either half.
        reduce: What a rank does in the reduce-scatter.
        gather: What a rank does in the all-gather.
    """

    blocks: int
    steps: int
    reduce: Half
    gather: Half

    @property
    def halves(self) -> tuple[Half, Half]:
        """The reduce-scatter and the all-gather."""
        return self.reduce, self.gather


def ring_demand(ranks: int, dimension: int = 0) -> Demand:
    """What :func:`~.plan.ring` needs, by formula."""
    share = Fraction(1, ranks)
    reduce = _flows(dimension, {MessageForm.CONTRIBUTION: min(ranks - 1, 1),
                                MessageForm.PARTIAL: max(ranks - 2, 0)}, share)
    gather = _flows(dimension, {MessageForm.RESULT: ranks - 1}, share)
    return Demand(ranks, 2 * (ranks - 1),
                  Half(reduce, (ranks - 1) * share, share), Half(gather))


def direct_demand(ranks: int) -> Demand:
    """What :func:`~.plan.direct` needs, by formula."""
    share = Fraction(1, ranks)
    reduce = _flows(0, {MessageForm.CONTRIBUTION: ranks - 1}, share)
    gather = _flows(0, {MessageForm.RESULT: ranks - 1}, share)
    return Demand(ranks, 2 * (ranks > 1),
                  Half(reduce, share * (ranks > 1), share), Half(gather))


def compose_demand(inner: Demand, outer: Demand,
                   encode_between: bool) -> Demand:
    """What :func:`~.plan.compose` needs, by formula.

    Args:
        inner: Demand of a plan in which every rank owns one block.
        outer: Demand of the plan between the groups.
        encode_between: The groups' means are encoded before they go on.
    """
    share = Fraction(1, inner.blocks)
    sums = not encode_between and inner.blocks > 1

    def scaled(half: Half) -> Half:
        """Half of the outer plan, which adds up sums if none is encoded."""
        return Half(_scaled(half.flows, share, sums),
                    half.own * share * (not sums), half.encoded * share)

    within = inner.reduce
    if not encode_between:
        within = Half(within.flows, within.own)
    return Demand(inner.blocks * outer.blocks, inner.steps + outer.steps,
                  _both(within, scaled(outer.reduce)),
                  _both(inner.gather, scaled(outer.gather)))


def torus2d_demand(rows: int, columns: int) -> tuple[Demand, Demand]:
    """What :func:`~.plan.torus2d` needs; rows lie in dimension 0."""
    def half(first: int, second: int, dimension: int) -> Demand:
        return compose_demand(ring_demand(first, dimension),
                              ring_demand(second, 1 - dimension), False)

    return half(columns, rows, 0), half(rows, columns, 1)


def _flows(dimension: int, counts: Mapping[MessageForm, int], share: Fraction
           ) -> Flows:
    return {(dimension, form): Traffic(count, count * share)
            for form, count in counts.items() if count}


def _scaled(flows: Flows, share: Fraction, sums: bool) -> Flows:
    """The flows for a share of the vector; contributions become sums."""
    total: dict[tuple[int, MessageForm], Traffic] = {}
    for (dimension, form), traffic in flows.items():
        if sums and form is MessageForm.CONTRIBUTION:
            form = MessageForm.PARTIAL
        before = total.get((dimension, form), NO_TRAFFIC)
        total[dimension, form] = before.and_(
            traffic._replace(elements=traffic.elements * share))
    return total


def _both(one: Half, other: Half) -> Half:
    flows = {key: one.flows.get(key, NO_TRAFFIC).and_(
        other.flows.get(key, NO_TRAFFIC))
        for key in (*one.flows, *other.flows)}
    return Half(flows, one.own + other.own, one.encoded + other.encoded)
