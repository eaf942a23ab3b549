"""What a plan needs, counted step by step: a reference for the formulas."""
from fractions import Fraction

from chainer_fp8pipe.allreduce.plan import Opcode
from chainer_fp8pipe.allreduce.rank_plan import program
from chainer_fp8pipe.planning.allreduce.codec_costs import form_of
from chainer_fp8pipe.planning.allreduce.demand import Demand, Half
from chainer_fp8pipe.planning.allreduce.plan_checker import check
from chainer_fp8pipe.planning.allreduce.traffic import NO_TRAFFIC, Traffic


def counted(plan, dimension=lambda source, target: 0):
    """The demand of a plan whose ranks all do the same.

    ``dimension`` gives that of a pair of ranks.
    """
    steps = check(plan).steps
    first, *others = (_halves(plan, rank, dimension)
                      for rank in range(plan.ranks))
    assert all(halves == first for halves in others)
    return Demand(plan.blocks, steps, *first)


def _halves(plan, rank, dimension):
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
        assert sent == received
        halves.append(Half(sent, own, encoded))
    return halves
