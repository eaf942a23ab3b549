"""What a plan asks of the ranks that have most to do, for any number of ranks.

Plans of thousands of ranks are too large to be written down.  Theirs are
symmetric, though: what one rank of each kind sends says all.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from ...allreduce.plan import Opcode, Plan
from ...allreduce.rank_plan import program
from .codec_costs import form_of
from .plan_checker import check
from .traffic import NO_TRAFFIC, MessageForm, Traffic

#: By dimension of the network and form.
Flows = Mapping[tuple[int, MessageForm], Traffic]


@dataclass(frozen=True)
class Half:
    """What a rank does in the reduce-scatter, or in the all-gather.

    Attributes:
        sent: Messages that leave it.
        received: Messages that reach it.
        own: Elements of its own contribution that it adds to sums, as a
            share of the vector.
        encoded: Elements whose mean it encodes, likewise; also where there
            is one contribution only.
    """

    sent: Flows = field(default_factory=dict)
    received: Flows = field(default_factory=dict)
    own: Fraction = Fraction(0)
    encoded: Fraction = Fraction(0)


class Role(NamedTuple):
    """What one kind of rank does."""

    reduce: Half
    gather: Half


@dataclass(frozen=True)
class Demand:
    """What an all-reduce needs.

    Attributes:
        blocks: Into how many the vector is cut.
        steps: Messages in the longest chain, half of them in either half.
        workers: What a worker does.
        servers: What a rank does that is no worker; None without.
    """

    blocks: int
    steps: int
    workers: Role
    servers: Role | None = None

    @property
    def roles(self) -> tuple[Role, ...]:
        """All that there are."""
        return ((self.workers,) if self.servers is None
                else (self.workers, self.servers))


def demand(plan: Plan, dimension: Callable[[int, int], int] | None = None
           ) -> Demand:
    """Counts what a plan needs.

    Args:
        plan: One whose workers all do the same, and its other ranks as well.
        dimension: Gives that of a pair of ranks; all are 0 by default.

    Raises:
        PlanError: The plan is no all-reduce.
        ValueError: Its ranks do not do the same.
    """
    steps = check(plan).steps
    roles = [_role(plan, rank, dimension or (lambda source, target: 0))
             for rank in range(plan.ranks)]
    workers, servers = roles[:plan.workers], roles[plan.workers:]
    for rank, role in enumerate(roles):
        if role != (workers if rank < plan.workers else servers)[0]:
            raise ValueError(f'plan {plan.name!r}: rank {rank} does not do '
                             'the same as the others')
    return Demand(plan.blocks, steps, workers[0],
                  servers[0] if servers else None)


def ring_demand(ranks: int, dimension: int = 0) -> Demand:
    """Of :func:`~.plan.ring`, by formula."""
    share = Fraction(1, ranks)
    reduce = _flows(dimension, {MessageForm.CONTRIBUTION: min(ranks - 1, 1),
                                MessageForm.PARTIAL: max(ranks - 2, 0)}, share)
    gather = _flows(dimension, {MessageForm.RESULT: ranks - 1}, share)
    return Demand(ranks, 2 * (ranks - 1), Role(
        Half(reduce, reduce, (ranks - 1) * share, share),
        Half(gather, gather)))


def direct_demand(ranks: int) -> Demand:
    """Of :func:`~.plan.direct`, by formula."""
    share = Fraction(1, ranks)
    reduce = _flows(0, {MessageForm.CONTRIBUTION: ranks - 1}, share)
    gather = _flows(0, {MessageForm.RESULT: ranks - 1}, share)
    return Demand(ranks, 2 * (ranks > 1), Role(
        Half(reduce, reduce, share * (ranks > 1), share),
        Half(gather, gather)))


def aggregator_demand(workers: int, aggregators: int) -> Demand:
    """Of :func:`~.plan.aggregator`, by formula."""
    share = Fraction(1, aggregators)

    def half(count: int, form: MessageForm) -> Flows:
        return _flows(0, {form: count}, share)

    return Demand(aggregators, 2, Role(
        Half(half(aggregators, MessageForm.CONTRIBUTION), {}),
        Half({}, half(aggregators, MessageForm.RESULT))), Role(
        Half({}, half(workers, MessageForm.CONTRIBUTION), encoded=share),
        Half(half(workers, MessageForm.RESULT), {})))


def compose_demand(inner: Demand, outer: Demand,
                   encode_between: bool) -> Demand:
    """Of :func:`~.plan.compose`, by formula.

    Args:
        inner: Of a plan in which every rank owns one block.
        outer: Of any plan.
        encode_between: As in :func:`~.plan.compose`.
    """
    share, members = Fraction(1, inner.blocks), inner.blocks
    sums = not encode_between and members > 1

    def scaled(half: Half, times: int) -> Half:
        """The outer plan's, which works on sums if they are not encoded."""
        return Half(_scaled(half.sent, share, times, sums),
                    _scaled(half.received, share, times, sums),
                    half.own * share * (not sums),
                    half.encoded * share * times)

    within = inner.workers
    if not encode_between:
        within = Role(Half(within.reduce.sent, within.reduce.received,
                           within.reduce.own), within.gather)
    around = Role(*(scaled(half, 1) for half in outer.workers))
    return Demand(
        inner.blocks * outer.blocks, inner.steps + outer.steps,
        Role(*map(_both, within, around)),
        outer.servers and Role(*(scaled(half, members)
                                 for half in outer.servers)))


def torus2d_demand(rows: int, columns: int) -> tuple[Demand, Demand]:
    """Of :func:`~.plan.torus2d`, by formula; rows lie in dimension 0."""
    def half(first: int, second: int, dimension: int) -> Demand:
        return compose_demand(ring_demand(first, dimension),
                              ring_demand(second, 1 - dimension), False)

    return half(columns, rows, 0), half(rows, columns, 1)


def _role(plan: Plan, rank: int, dimension: Callable[[int, int], int]
          ) -> Role:
    part = program(plan, rank)
    reduced = len(plan.reduced(rank))
    halves = []
    for steps in part.steps[:reduced], part.steps[reduced:]:
        sent: dict[tuple[int, MessageForm], Traffic] = {}
        received: dict[tuple[int, MessageForm], Traffic] = {}
        own = encoded = Fraction(0)
        for step in steps:
            kind, peer, start, stop = step.action
            share = Fraction(stop - start, plan.blocks)
            if kind is Opcode.ENCODE:
                encoded += share
                continue
            flows = (sent if kind in (Opcode.SEND_PARTIAL, Opcode.SEND_RESULT)
                     else received)
            key = dimension(rank, peer), form_of(step)
            flows[key] = flows.get(key, NO_TRAFFIC).and_(Traffic(1, share))
            if (kind is Opcode.RECEIVE_PARTIAL and step.fresh
                    and part.contributes):
                own += share
        halves.append(Half(sent, received, own, encoded))
    return Role(*halves)


def _flows(dimension: int, counts: Mapping[MessageForm, int], share: Fraction
           ) -> Flows:
    return {(dimension, form): Traffic(count, count * share)
            for form, count in counts.items() if count}


def _scaled(flows: Flows, share: Fraction, times: int, sums: bool) -> Flows:
    """Of smaller blocks, more often; and of sums instead of contributions."""
    total: dict[tuple[int, MessageForm], Traffic] = {}
    for (dimension, form), traffic in flows.items():
        if sums and form is MessageForm.CONTRIBUTION:
            form = MessageForm.PARTIAL
        before = total.get((dimension, form), NO_TRAFFIC)
        total[dimension, form] = before.and_(Traffic(
            traffic.messages * times, traffic.elements * share * times))
    return total


def _both(one: Half, other: Half) -> Half:
    def joined(first: Flows, second: Flows) -> Flows:
        keys = dict.fromkeys((*first, *second))
        return {key: first.get(key, NO_TRAFFIC).and_(
            second.get(key, NO_TRAFFIC)) for key in keys}

    return Half(joined(one.sent, other.sent),
                joined(one.received, other.received),
                one.own + other.own, one.encoded + other.encoded)
