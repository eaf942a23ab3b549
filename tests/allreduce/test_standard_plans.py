"""Which plan a name means."""
from chainer_fp8pipe.allreduce import standard_plans
from chainer_fp8pipe.allreduce.plan import Opcode


def peers(plan, rank, kind=Opcode.SEND_PARTIAL):
    return {action.peer for action in plan.actions(rank)
            if action.kind is kind}


def test_in_one_level_a_ring_talks_to_its_neighbour_only():
    plan, = standard_plans.one_level('ring', 5)
    assert peers(plan, 3) == {4}
    assert peers(plan, 4) == {0}


def test_of_two_levels_the_outer_one_joins_equal_local_ranks():
    # Ranks 0, 2 and 4 are on one node: the numbers of ranks do not matter.
    plan, = standard_plans.two_level(
        'direct', 'direct', [[0, 2, 4], [1, 3, 5]])
    assert peers(plan, 2) == {0, 4, 3}
    assert plan.workers == plan.ranks == 6


def test_a_toruss_rows_are_nodes():
    nodes = [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    rows_first, columns_first = standard_plans.torus((3, 3), nodes)
    # Rank 4 is in the middle: right of it is 7, below it is 5.
    assert peers(rows_first, 4) == peers(columns_first, 4) == {7, 5}
    first = [plan.actions(4)[0].peer for plan in (rows_first, columns_first)]
    assert first == [7, 5]
