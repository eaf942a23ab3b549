"""Waiting for something."""
import threading

from chainer_fp8pipe.mpi import waiting
from chainer_fp8pipe.mpi.waiting import wait_until

import pytest


@pytest.mark.parametrize('polls', [1, 2, 21, 22, 5000])
def test_it_polls_until_it_is_so_and_not_longer(polls):
    count = 0

    def done():
        nonlocal count
        count += 1
        return count >= polls

    wait_until(done)
    assert count == polls


def test_another_thread_can_bring_it_about():
    event = threading.Event()
    thread = threading.Timer(0.05, event.set)
    thread.start()
    wait_until(event.is_set)
    assert event.is_set()
    thread.join()


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
    monkeypatch.setattr(waiting, '_yield', give_way)
    return lengths


def test_pauses_double_up_to_the_longest_and_begin_by_yielding(slept):
    pauses = waiting.Pauses()
    for _ in range(220):        # the clock of yields takes 2 ms for 200
        pauses.pause(1e-3)
    first = [20e-6 * 2 ** n for n in range(6)]
    assert slept[:6] == pytest.approx(first)
    assert slept[6:] == pytest.approx([1e-3] * len(slept[6:]))
    assert 15 < len(slept) < 25


def test_work_shortens_the_next_pause(slept):
    pauses = waiting.Pauses()
    for _ in range(220):
        pauses.pause(1e-3)
    for _ in range(10):
        pauses.shorten()
    pauses.pause(1e-3)
    assert slept[-1] == pytest.approx(2 * 1e-3 * 0.9 ** 10)


def test_nobody_sleeps_for_what_takes_no_longer_than_a_sleep(slept):
    pauses = waiting.Pauses()
    for _ in range(1000):
        pauses.pause(1e-6)
    assert slept == []
