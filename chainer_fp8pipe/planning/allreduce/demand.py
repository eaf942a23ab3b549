"""What an all-reduce asks of a rank, for any number of ranks.

Plans of thousands of ranks are too large to be written down.  In the plans
here all ranks do the same, though: the demand of one rank says all.  The
aggregators of :func:`aggregator_demand` are the exception.
"""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction

from .traffic import MessageForm


@dataclass(frozen=True)
class Phase:
    """Steps that are alike, each of which waits for the one before.

    Attributes:
        steps: How many.
        messages: That leave a rank in a step, before the rank receives.
        share: Of the vector, in each message.
        form: What the messages carry.
        received: Messages that reach a rank in a step.
        dimension: Of the network.
        own: Elements of the rank's own contribution that are added to sums in
            a step, as a share of the vector.
        fresh: Gradients are first needed here: contributions that are sent,
            and what is ``own``.
        mean: Elements whose mean the rank encodes after the steps, as a share
            of the vector; also where there is one contribution only.
    """

    steps: int
    messages: int
    share: Fraction
    form: MessageForm
    received: int
    dimension: int = 0
    own: Fraction = Fraction(0)
    fresh: bool = False
    mean: Fraction = Fraction(0)


@dataclass(frozen=True)
class Demand:
    """What an all-reduce needs of each rank.

    Attributes:
        blocks: Into how many the vector is cut.
        reduce: What a rank does in the reduce-scatter.
        gather: What a rank does in the all-gather.
        served: Other ranks, the aggregators, sum for all.  What leaves one of
            the one side reaches one of the other: ``messages`` are of the
            side that sends, ``received`` of the other.
    """

    blocks: int
    reduce: tuple[Phase, ...]
    gather: tuple[Phase, ...]
    served: bool = False

    @property
    def steps(self) -> int:
        """Messages in the longest chain."""
        return sum(phase.steps for phase in (*self.reduce, *self.gather))


def ring_demand(ranks: int, dimension: int = 0) -> Demand:
    """What :func:`~.plan.ring` needs, by formula."""
    share = Fraction(1, ranks)
    first = min(ranks - 1, 1)
    return Demand(
        ranks,
        (Phase(first, 1, share, MessageForm.CONTRIBUTION, 1, dimension, share,
               True),
         Phase(ranks - 1 - first, 1, share, MessageForm.PARTIAL, 1, dimension,
               share, True, share)),
        (Phase(ranks - 1, 1, share, MessageForm.RESULT, 1, dimension),))


def direct_demand(ranks: int) -> Demand:
    """What :func:`~.plan.direct` needs, by formula."""
    share = Fraction(1, ranks)
    steps, others = min(ranks - 1, 1), ranks - 1
    return Demand(
        ranks,
        (Phase(steps, others, share, MessageForm.CONTRIBUTION, others,
               own=share, fresh=True, mean=share),),
        (Phase(steps, others, share, MessageForm.RESULT, others),))


def aggregator_demand(workers: int, aggregators: int) -> Demand:
    """What :func:`~.plan.aggregator` needs, by formula."""
    share = Fraction(1, aggregators)
    return Demand(
        aggregators,
        (Phase(1, aggregators, share, MessageForm.CONTRIBUTION, workers,
               fresh=True, mean=share),),
        (Phase(1, workers, share, MessageForm.RESULT, aggregators),),
        served=True)


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

    def scaled(phase: Phase) -> Phase:
        """The phase for a share of the vector.

        If none is encoded, contributions are sums, of which the rank's own is
        there before.
        """
        form = (MessageForm.PARTIAL if sums
                and phase.form is MessageForm.CONTRIBUTION else phase.form)
        return dataclasses.replace(
            phase, share=phase.share * share, form=form,
            own=phase.own * share * (not sums), mean=phase.mean * share,
            fresh=phase.fresh and inner.blocks == 1 and not encode_between)

    within = inner.reduce
    if not encode_between:
        within = tuple(dataclasses.replace(phase, mean=Fraction(0))
                       for phase in within)
    return Demand(inner.blocks * outer.blocks,
                  (*within, *map(scaled, outer.reduce)),
                  (*map(scaled, outer.gather), *inner.gather))


def torus2d_demand(rows: int, columns: int) -> tuple[Demand, Demand]:
    """What :func:`~.plan.torus2d` needs; rows lie in dimension 0."""
    def half(first: int, second: int, dimension: int) -> Demand:
        return compose_demand(ring_demand(first, dimension),
                              ring_demand(second, 1 - dimension), False)

    return half(columns, rows, 0), half(rows, columns, 1)
