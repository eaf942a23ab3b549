"""What is said about why something is fastest."""
from chainer_fp8pipe.bench.explanation import Contender, Shares, explain

import pytest
from hypothesis import given
from hypothesis import strategies as st

MPI = Contender("MPI's Allreduce", True, 7e-3, None)
RING = Contender('float32 ring', True, 20e-3, Shares(4e-3, 1e-3, 8_000_000))


def test_where_compression_pays_it_says_what_is_saved():
    fast = Contender('int4 direct', False, 5e-3, Shares(3e-3, 0.5e-3, 10))
    assert explain([MPI, RING, fast]) == [
        "why: int4 direct takes 5 ms (3 of the processor, 1.5 of the wire, "
        "0.5 of latency); without compression MPI's Allreduce takes 7 ms"]


def test_where_it_does_not_it_warns():
    slow = Contender('fp8 direct', False, 10e-3, Shares(8e-3, 1e-3, 10))
    assert explain([slow, RING, MPI]) == [
        "warning: no compression pays here: MPI's Allreduce takes 7 ms, fp8 "
        'direct takes 10 ms (8 of the processor, 1 of the wire, 1 of '
        'latency)']


def test_without_anything_to_compare_with_it_says_nothing():
    assert explain([MPI, RING]) == []


@given(st.floats(1e-6, 1), st.floats(0, 2), st.floats(0, 2))
def test_shares_are_of_a_hundred(seconds, processor, latency):
    parts = Shares(processor, latency, 0).percent(seconds)
    assert sum(parts) == 100
    assert min(parts) >= 0


@pytest.mark.parametrize(('processor', 'latency', 'wire'), [
    (1.0, 0.5, 0.5), (2.0, 0.5, 0.0)])
def test_the_wire_has_the_rest(processor, latency, wire):
    assert Shares(processor, latency, 0).wire(2.0) == wire
