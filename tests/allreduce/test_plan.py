"""Plans give the mean, with the bytes and steps that their papers count."""
from fractions import Fraction

from chainer_fp8pipe.allreduce.plan import (
    Instruction,
    Opcode,
    aggregator,
    compose,
    direct,
    ring,
    torus2d,
    two_level,
)

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .plan_checker import MessageForm, check
from .plans import interpret, plans

quick = settings(max_examples=100)


def elements(traffic):
    return sum(entry.elements for entry in traffic.values())


def messages(traffic):
    return sum(entry.messages for entry in traffic.values())


@quick
@given(plans(16))
def test_every_plan_is_proved(plan):
    check(plan)


@quick
@given(plans(9), st.sampled_from([0, 1, 3, 50]), st.integers(0, 99))
def test_every_worker_gets_the_mean(plan, size, seed):
    vectors = numpy.random.default_rng(seed).normal(size=(plan.workers, size))
    for result in interpret(plan, vectors):
        assert result == pytest.approx(vectors.mean(axis=0), rel=1e-12,
                                       abs=1e-12)


@quick
@given(plans(9))
def test_a_plan_is_the_same_when_made_again(plan):
    """Ranks make it each for itself; results must come in the same bits."""
    vectors = numpy.random.default_rng(0).normal(size=(plan.workers, 20))
    first, *others = interpret(plan, vectors)
    for other in others:
        assert other.tobytes() == first.tobytes()


def test_a_ring_of_three_is_as_drawn_by_hand():
    reduce, gather = ring(3).reduce[1], ring(3).gather[1]
    assert reduce == (Instruction(Opcode.SEND_PARTIAL, 2, 0, 1),
                      Instruction(Opcode.RECEIVE_PARTIAL, 0, 2, 3),
                      Instruction(Opcode.SEND_PARTIAL, 2, 2, 3),
                      Instruction(Opcode.RECEIVE_PARTIAL, 0, 1, 2))
    assert gather == (Instruction(Opcode.SEND_RESULT, 2, 1, 2),
                      Instruction(Opcode.RECEIVE_RESULT, 0, 0, 1),
                      Instruction(Opcode.SEND_RESULT, 2, 0, 1),
                      Instruction(Opcode.RECEIVE_RESULT, 0, 2, 3))


@pytest.mark.parametrize('ranks', range(1, 17))
@pytest.mark.parametrize(('make', 'steps'), [
    (direct, lambda ranks: 2 * (ranks > 1)),
    (ring, lambda ranks: 2 * (ranks - 1))])
def test_ring_and_direct_send_what_every_all_reduce_must(make, steps, ranks):
    report = check(make(ranks))
    for rank in range(ranks):
        assert elements(report.sent(rank)) == Fraction(2 * (ranks - 1), ranks)
        assert elements(report.received(rank)) == elements(report.sent(rank))
        assert messages(report.sent(rank)) == 2 * (ranks - 1)
    assert report.steps == steps(ranks)


def test_direct_sends_no_partial_sums_and_a_ring_all_but_the_first():
    assert MessageForm.PARTIAL not in check(direct(8)).sent(3)
    forms = check(ring(8)).sent(3)
    assert forms[MessageForm.CONTRIBUTION].messages == 1
    assert forms[MessageForm.PARTIAL].messages == 6
    assert forms[MessageForm.RESULT].messages == 7


def test_a_ring_uses_the_links_to_the_next_rank_only():
    assert set(check(ring(5)).pairs) == {
        (rank, (rank + 1) % 5) for rank in range(5)}


@pytest.mark.parametrize(('workers', 'aggregators'), [
    (1, 1), (4, 1), (4, 2), (4, 4), (3, 5)])
def test_a_worker_sends_the_vector_to_the_aggregators_once(
        workers, aggregators):
    report = check(aggregator(workers, aggregators))
    for rank in range(workers):
        assert elements(report.sent(rank)) == 1
        assert elements(report.received(rank)) == 1
    for rank in range(workers, workers + aggregators):
        share = Fraction(workers, aggregators)
        assert elements(report.sent(rank)) == share
        assert elements(report.received(rank)) == share
    assert report.steps == 2


@pytest.mark.parametrize('shape', [(2, 2), (3, 3), (2, 4), (5, 3), (4, 4)])
def test_a_torus_sends_what_a_ring_sends_divided_over_the_dimensions(shape):
    rows, columns = shape
    halves = [check(plan) for plan in torus2d(rows, columns)]
    ranks = rows * columns
    for rank in range(ranks):
        total, in_row = Fraction(0), Fraction(0)
        for report in halves:
            for (source, target), traffic in report.pairs.items():
                if source == rank:
                    total += elements(traffic) / 2
                    if target // columns == rank // columns:
                        in_row += elements(traffic) / 2
        assert total == Fraction(2 * (ranks - 1), ranks)
        if rows == columns:
            assert in_row == total / 2
    assert [report.steps for report in halves] == [
        2 * (rows - 1) + 2 * (columns - 1)] * 2


def test_a_torus_uses_the_links_between_neighbours_only():
    for plan in torus2d(3, 4):
        for source, target in check(plan).pairs:
            (row, column), (row_to, column_to) = (
                divmod(source, 4), divmod(target, 4))
            assert ((row_to - row) % 3, (column_to - column) % 4) in (
                (0, 1), (1, 0))


def peers(plan, rank):
    return {action.peer for action in plan.actions(rank)
            if action.kind is Opcode.SEND_PARTIAL}


def test_a_toruss_rows_may_be_nodes_however_ranks_are_numbered():
    rows_first, columns_first = torus2d(3, 3, [0, 3, 6, 1, 4, 7, 2, 5, 8])
    # Rank 4 is in the middle: right of it is 7, below it is 5.
    assert peers(rows_first, 4) == peers(columns_first, 4) == {7, 5}
    first = [plan.actions(4)[0].peer for plan in (rows_first, columns_first)]
    assert first == [7, 5]


def test_of_two_levels_the_outer_one_joins_equal_local_ranks():
    # Ranks 0, 2 and 4 are on one node: the numbers of ranks do not matter.
    plan = two_level('direct', direct(2), [[0, 2, 4], [1, 3, 5]])
    assert peers(plan, 2) == {0, 4, 3}
    assert plan.workers == plan.ranks == 6


@pytest.mark.parametrize('encode_between', [False, True])
def test_only_a_share_of_the_vector_leaves_the_node(encode_between):
    """Four ranks in each of three nodes: the paper's hierarchical form."""
    report = check(compose(direct(4), ring(3),
                           lambda member, node: 4 * node + member,
                           encode_between))
    outside = {form: sum(
        (forms[form].elements for (source, target), forms
         in report.pairs.items()
         if source == 5 and target // 4 != 1 and form in forms),
        Fraction(0)) for form in MessageForm}
    assert sum(outside.values()) == Fraction(2 * 2, 3) / 4
    # What crosses first is in the wire's format only if it was encoded.
    assert outside[MessageForm.CONTRIBUTION] == encode_between * \
        Fraction(1, 12)


def test_servers_of_two_levels_serve_every_member():
    report = check(compose(ring(2), aggregator(3, 1),
                           lambda member, node: 2 * node + member, True))
    assert elements(report.received(6)) == 3
    assert elements(report.sent(6)) == 3


def test_what_cannot_be_composed_is_an_error():
    with pytest.raises(ValueError, match="'aggregator' cannot be the inner"):
        compose(aggregator(2, 1), ring(2), lambda member, group: 0, True)
    two = compose(ring(2), ring(2), lambda member, group: 2 * group + member,
                  True)
    with pytest.raises(ValueError, match='encode_between=True'):
        compose(ring(2), two, lambda member, group: 2 * group + member, False)
