"""Waiting for something."""
from chainer_fp8pipe.mpi import waiting
from chainer_fp8pipe.mpi.waiting import wait_until

import pytest


@pytest.mark.parametrize('polls', [1, 2, 21, 22, 5000])
def test_wait_until_stops_polling_at_the_first_true(polls):
    count = 0

    def done():
        nonlocal count
        count += 1
        return count >= polls

    wait_until(done)
    assert count == polls


def test_an_error_ends_the_wait():
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: 1 // 0 > 0)


@pytest.fixture
def slept(monkeypatch):
    """The lengths of all sleeps; the clock goes on by as much."""
    lengths = []
    monkeypatch.setattr(waiting.time, 'sleep', lengths.append)
    monkeypatch.setattr(waiting.time, 'perf_counter',
                        lambda: sum(lengths) + 1e-5 * yields[0])
    yields = [0]

    def give_way():
        yields[0] += 1
    monkeypatch.setattr(waiting, 'give_way', give_way)
    return lengths


def test_pauses_are_a_part_of_the_wait_after_yields(slept):
    pauses = waiting.Pauses()
    for _ in range(320):        # the clock of yields takes 2 ms for 200
        pauses.pause(1e-3)
    lengths = [length for length in slept if length < 1e-3]
    waited = 2e-3
    for length in lengths:
        assert length == pytest.approx(waited / 32, rel=0.02)
        waited += length
    assert waited == pytest.approx(32e-3, rel=0.05)
    assert slept[len(lengths):] == [1e-3] * (len(slept) - len(lengths))
    assert 100 < len(slept) < 130


def test_a_new_wait_begins_by_yielding(slept):
    pauses = waiting.Pauses()
    for _ in range(230):
        pauses.pause(1e-3)
    pauses.restart()
    before = len(slept)
    for _ in range(150):
        pauses.pause(1e-3)
    assert len(slept) == before
