"""Ranks that take part find each other, and wait for nobody else."""
from unittest import mock

from chainer_fp8pipe.mpi import attendance
from chainer_fp8pipe.mpi.attendance import Attendance

import pytest

from tests.ranks import on_ranks


@on_ranks(1, 2, 4)
@pytest.mark.parametrize('others', [(), (1,), (-1,), (0, 1, 2, 3)])
def test_all_find_those_that_are_there_and_wait_for_nobody_else(comm, others):
    ranks = {0, *(rank % comm.size for rank in others)}
    if comm.rank in ranks:
        there = Attendance(comm, 'It')
    comm.Barrier()
    if comm.rank in ranks:
        patience = attendance.PATIENCE if len(ranks) == comm.size else 0.5
        with mock.patch.object(attendance, 'PATIENCE', patience):
            assert there.settle() == tuple(sorted(ranks))
    comm.Barrier()


@on_ranks(2)
def test_without_rank_0_there_is_an_error_that_names_the_remedy(comm):
    if comm.rank:
        there = Attendance(comm, 'It')
        with mock.patch.object(attendance, 'IN_VAIN', 0.2), pytest.raises(
                RuntimeError, match='rank 1: It is on this rank but not on '
                'rank 0, which writes; give it to all ranks'):
            there.settle()
    comm.Barrier()
    if comm.rank == 0:      # takes what was sent in vain
        Attendance(comm, 'It')._heard()
