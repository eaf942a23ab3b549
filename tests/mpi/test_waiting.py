"""Waiting for something."""
import threading

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
