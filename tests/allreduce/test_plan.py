"""Plans give the mean, with the bytes and steps that their papers count."""
import dataclasses
from fractions import Fraction

from chainer_fp8pipe.allreduce.plan import (
    Opcode,
    aggregator,
    compose,
    cut,
    direct,
    ring,
    torus2d,
)

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .helpers import plan as usual
from .plans import TABLE, Report, Wrong


@st.composite
def plans(draw, ranks=16):
    """A plan of at most so many ranks."""
    kind = draw(st.sampled_from(['one', 'torus', 'two', 'three']))
    if kind == 'one':
        return draw(simple(ranks))
    rows = draw(st.integers(1, max(1, ranks // 2)))
    columns = draw(st.integers(1, max(1, ranks // rows)))
    if kind == 'torus':
        return torus2d(rows, columns)
    servers = draw(st.integers(0, ranks - rows * columns))
    outer = (aggregator(columns, servers) if servers else usual(draw(
        st.sampled_from([name for name, row in TABLE.items() if row.plan
                         and row.two_level and not row.has_servers])
        ), columns))
    inner = draw(st.sampled_from([direct, ring]))(rows)
    plan = compose(inner, outer, lambda member, group: group * rows + member,
                   draw(st.booleans()))
    if kind == 'three' and not servers and 2 * plan.ranks <= ranks:
        plan = compose(plan, ring(2),
                       lambda member, group: 2 * member + group,
                       draw(st.booleans()))
    return plan


@st.composite
def simple(draw, ranks):
    """A plan of a row of the table."""
    row = draw(st.sampled_from([
        row for row in TABLE.values() if row.plan]))
    if row.has_servers and ranks > 1:
        workers = draw(st.integers(1, ranks - 1))
        return aggregator(workers, draw(st.integers(1, ranks - workers)))
    return usual('direct' if row.has_servers else row.name,
                 draw(st.integers(1, ranks)))


@settings(max_examples=150)
@given(plans(16))
def test_every_plan_is_proved(plan):
    Report(plan)


def test_a_plan_that_is_none_is_found():
    """The proof could fail."""
    plan = ring(3)
    for field, place, change in [
            ('gather', 0, lambda actions: actions[:-1]),
            ('reduce', 1, lambda actions: actions[::-1]),
            ('reduce', 2, lambda actions: actions[:2])]:
        parts = list(getattr(plan, field))
        parts[place] = change(parts[place])
        with pytest.raises((Wrong, KeyError)):
            Report(dataclasses.replace(plan, **{field: tuple(parts)}))


@given(st.integers(0, 100), st.integers(0, 1000), st.integers(1, 20))
def test_parts_cover_a_range_evenly(start, length, parts):
    bounds = cut(start, start + length, parts)
    sizes = numpy.diff(bounds)
    assert (bounds[0], bounds[-1], len(sizes)) == (
        start, start + length, parts)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize('ranks', range(1, 17))
@pytest.mark.parametrize(('make', 'steps', 'partials'), [
    (direct, lambda ranks: 2 * (ranks > 1), lambda ranks: 0),
    (ring, lambda ranks: 2 * (ranks - 1), lambda ranks: max(ranks - 2, 0))])
def test_ring_and_direct_send_what_every_all_reduce_must(
        make, steps, partials, ranks):
    report = Report(make(ranks))
    for rank in range(ranks):
        must = 2 * (ranks - 1), Fraction(2 * (ranks - 1), ranks)
        assert report.sent(rank) == report.received(rank) == must
        assert report.sent(rank, ['partial'])[0] == partials(ranks)
    assert report.steps == steps(ranks)


def test_a_ring_and_a_torus_use_the_links_between_neighbours_only():
    assert Report(ring(5)).pairs() == {
        (rank, (rank + 1) % 5) for rank in range(5)}
    for source, target in Report(torus2d(3, 4)).pairs():
        (row, column), (row_to, column_to) = (
            divmod(source, 4), divmod(target, 4))
        assert ((row_to - row) % 3, (column_to - column) % 4) in (
            (0, 1), (1, 0))


@pytest.mark.parametrize(('workers', 'aggregators'), [
    (1, 1), (4, 1), (4, 2), (4, 4), (3, 5)])
def test_a_worker_sends_the_vector_to_the_aggregators_once(
        workers, aggregators):
    report = Report(aggregator(workers, aggregators))
    for rank in range(workers + aggregators):
        share = 1 if rank < workers else Fraction(workers, aggregators)
        assert report.sent(rank)[1] == report.received(rank)[1] == share
    assert report.steps == 2


@pytest.mark.parametrize('shape', [(2, 2), (3, 3), (2, 4), (5, 3), (4, 4)])
def test_a_torus_sends_what_a_ring_sends_divided_over_the_dimensions(shape):
    rows, columns = shape
    report, ranks = Report(torus2d(rows, columns)), rows * columns
    for rank in range(ranks):
        total = report.sent(rank)[1]
        in_row = sum(share for (source, target, _), (_, share)
                     in report.traffic.items() if source == rank
                     and target // columns == rank // columns)
        assert total == Fraction(2 * (ranks - 1), ranks)
        if rows == columns:
            assert in_row == total / 2
    assert report.steps == 2 * (rows - 1) + 2 * (columns - 1)


def peers(plan, rank):
    return {action.peer for action in plan.actions(rank)
            if action.kind is Opcode.SEND_PARTIAL}


def test_a_toruss_rows_may_be_nodes_however_ranks_are_numbered():
    plan = torus2d(3, 3, [0, 3, 6, 1, 4, 7, 2, 5, 8])
    # Rank 4 is in the middle: right of it is 7, below it is 5.
    assert peers(plan, 4) == {7, 5}
    assert [action.peer for action in plan.actions(4)[:2]] == [7, 5]


@pytest.mark.parametrize('encode_between', [False, True])
def test_only_a_share_of_the_vector_leaves_the_node(encode_between):
    """Four ranks in each of three nodes: the paper's hierarchical form."""
    report = Report(compose(direct(4), ring(3),
                            lambda member, node: 4 * node + member,
                            encode_between))
    outside = {form: share for (source, target, form), (_, share)
               in report.traffic.items() if source == 5 and target // 4 != 1}
    assert sum(outside.values()) == Fraction(2 * 2, 3) / 4
    # What crosses first is in the wire's format only if it was encoded.
    assert outside.get('contribution', 0) == encode_between * Fraction(1, 12)


def test_what_cannot_be_composed_is_an_error():
    with pytest.raises(ValueError, match="'aggregator' cannot be the inner"):
        compose(aggregator(2, 1), ring(2), lambda member, group: 0, True)
    two = compose(ring(2), ring(2), lambda member, group: 2 * group + member,
                  True)
    with pytest.raises(ValueError, match='encode_between=True'):
        compose(ring(2), two, lambda member, group: 2 * group + member, False)
