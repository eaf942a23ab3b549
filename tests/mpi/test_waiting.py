"""Waiting for something."""
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
