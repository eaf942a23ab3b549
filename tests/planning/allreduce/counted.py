"""What a plan needs, counted step by step: a reference for the formulas."""
from fractions import Fraction
from typing import Any, NamedTuple

from chainer_fp8pipe.allreduce.plan import Opcode
from chainer_fp8pipe.allreduce.rank_plan import program
from chainer_fp8pipe.planning.allreduce.codec_costs import form_of
from chainer_fp8pipe.planning.allreduce.plan_checker import check
from chainer_fp8pipe.planning.allreduce.traffic import NO_TRAFFIC, Traffic


class Half(NamedTuple):
    """What a rank does in the reduce-scatter, or in the all-gather.

    ``sent`` and ``received`` have the traffic by dimension and form, ``own``
    and ``encoded`` shares of the vector.
    """

    sent: dict[Any, Any]
    received: dict[Any, Any]
    own: Fraction
    encoded: Fraction


class Counts(NamedTuple):
    """Blocks, steps of the longest chain, and both halves of a rank."""

    blocks: int
    steps: int
    halves: list[Half]


def counted(plan, dimension=lambda source, target: 0):
    """The counts of a plan whose ranks all do the same.

    ``dimension`` gives that of a pair of ranks.
    """
    first, *others = (rank_halves(plan, rank, dimension)
                      for rank in range(plan.ranks))
    assert all(halves == first for halves in others)
    assert all(half.sent == half.received for half in first)
    return Counts(plan.blocks, check(plan).steps, first)


def demanded(need):
    """The counts of a demand."""
    return Counts(need.blocks, need.steps,
                  [half_of(need.reduce), half_of(need.gather)])


def half_of(phases):
    half = Half({}, {}, sum((phase.steps * phase.own for phase in phases),
                            Fraction(0)),
                sum((phase.mean for phase in phases), Fraction(0)))
    for phase in phases:
        key = phase.dimension, phase.form
        for flows, messages in ((half.sent, phase.messages),
                                (half.received, phase.received)):
            count = phase.steps * messages
            if count:
                flows[key] = flows.get(key, NO_TRAFFIC).and_(
                    Traffic(count, count * phase.share))
    return half


def rank_halves(plan, rank, dimension=lambda source, target: 0):
    """Both halves of one rank."""
    part = program(plan, rank)
    reduced = len(plan.reduced(rank))
    halves = []
    for steps in part.steps[:reduced], part.steps[reduced:]:
        sent, received = {}, {}
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
    return halves
