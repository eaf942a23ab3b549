"""Formulas say what plans of a few ranks have in them."""
from fractions import Fraction

from chainer_fp8pipe.allreduce.plan import (
    aggregator,
    compose,
    direct,
    ring,
    torus2d,
)
from chainer_fp8pipe.planning.allreduce.demand import (
    aggregator_demand,
    compose_demand,
    direct_demand,
    ring_demand,
    torus2d_demand,
)
from chainer_fp8pipe.planning.allreduce.plan_checker import check
from chainer_fp8pipe.planning.allreduce.traffic import MessageForm, Traffic

import pytest

from .counted import counted, demanded, half_of, rank_halves


@pytest.mark.parametrize('ranks', range(1, 17))
def test_the_formulas_of_ring_and_direct_are_those_of_their_plans(ranks):
    assert demanded(ring_demand(ranks)) == counted(ring(ranks))
    assert demanded(direct_demand(ranks)) == counted(direct(ranks))


@pytest.mark.parametrize('encode_between', [False, True])
@pytest.mark.parametrize('outer', [(ring, ring_demand),
                                   (direct, direct_demand)])
@pytest.mark.parametrize('inner', [(ring, ring_demand),
                                   (direct, direct_demand)])
def test_the_formulas_of_two_levels_are_those_of_their_plans(
        inner, outer, encode_between):
    for members in range(1, 5):
        for groups in range(1, 5):
            plan = compose(
                inner[0](members), outer[0](groups),
                lambda member, group, width=members: group * width + member,
                encode_between)
            assert demanded(compose_demand(
                inner[1](members), outer[1](groups), encode_between)
                            ) == counted(plan)


@pytest.mark.parametrize('rows', range(1, 5))
@pytest.mark.parametrize('columns', range(1, 5))
def test_the_formulas_of_a_torus_are_those_of_its_plans(rows, columns):
    def dimension(source, target):
        return int(source // columns != target // columns)

    assert [demanded(need) for need in torus2d_demand(rows, columns)] == [
        counted(plan, dimension) for plan in torus2d(rows, columns)]


@pytest.mark.parametrize(('workers', 'aggregators'), [(1, 1), (4, 1), (3, 2),
                                                      (4, 4)])
def test_the_formulas_of_aggregators_are_those_of_their_plans(workers,
                                                              aggregators):
    plan = aggregator(workers, aggregators)
    need = aggregator_demand(workers, aggregators)
    assert (need.blocks, need.steps) == (plan.blocks, check(plan).steps)
    reduce, gather = half_of(need.reduce), half_of(need.gather)
    for worker in range(workers):
        first, second = rank_halves(plan, worker)
        assert (first.sent, second.received) == (reduce.sent, gather.received)
    for server in range(workers, plan.ranks):
        first, second = rank_halves(plan, server)
        assert (first.received, second.sent) == (reduce.received, gather.sent)
        assert first.encoded == reduce.encoded


def test_a_large_torus_has_few_steps():
    for half in torus2d_demand(64, 64):
        assert half.steps == 4 * 63
        total = sum(traffic.elements for traffic
                    in half_of(half.gather).sent.values())
        assert total == Fraction(4095, 4096)


def test_what_a_ring_of_three_does_is_counted_by_hand():
    third = Fraction(1, 3)
    reduce, gather = demanded(ring_demand(3)).halves
    assert reduce.sent == {(0, MessageForm.CONTRIBUTION): Traffic(1, third),
                           (0, MessageForm.PARTIAL): Traffic(1, third)}
    assert (reduce.own, reduce.encoded) == (2 * third, third)
    assert gather.sent == {(0, MessageForm.RESULT): Traffic(2, 2 * third)}
    assert (gather.own, gather.encoded) == (0, 0)
