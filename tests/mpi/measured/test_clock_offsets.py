"""Clocks of ranks, as messages tell them."""
import time
from unittest import mock

from chainer_fp8pipe.mpi.measured import clock_offsets
from chainer_fp8pipe.mpi.measured.clock_offsets import (
    clock_name,
    measure_offsets,
)

from tests.ranks import on_ranks

#: Seconds that each rank's clock is ahead of the machine's.
AHEAD = 0.0, 1000.0, -50.0, 3.5


class Shifted:
    """The time module of a rank whose clock is ahead."""

    def __init__(self, seconds):
        self.monotonic = lambda: time.monotonic() + seconds


@on_ranks(2, 4)
def test_offsets_are_right_to_the_error_that_is_said(comm):
    own = comm.Dup()
    with mock.patch.object(clock_offsets, 'time',
                           Shifted(AHEAD[comm.rank])):
        found = measure_offsets(
            own, [str(rank) for rank in range(comm.size)])
    own.Free()
    if comm.rank:
        assert not found
        return
    assert found[0] == (0.0, 0.0)
    for (offset, error), ahead in zip(found, AHEAD, strict=False):
        assert abs(offset - ahead) <= error + 1e-9


@on_ranks(4)
def test_ranks_that_share_a_clock_are_asked_once_or_never(comm):
    own = comm.Dup()
    names = ['one', 'one', 'other', 'other']
    with mock.patch.object(clock_offsets, 'time',
                           Shifted(5.0 if comm.rank > 1 else 0.0)):
        found = measure_offsets(own, names)
    own.Free()
    if comm.rank == 0:
        assert found[:2] == [(0.0, 0.0)] * 2
        assert found[2] == found[3]
        assert abs(found[2][0] - 5) <= found[2][1] + 1e-9


@on_ranks(2)
def test_processes_of_one_system_share_a_clock(comm):
    names = comm.allgather(clock_name())
    assert names[0] == names[1] != ''
