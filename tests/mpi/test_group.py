import copy
import pickle

from chainer_fp8pipe.mpi.group import Group
from chainer_fp8pipe.mpi.groups import split_groups

import numpy as np
import pytest
from mpi4py import MPI

from ..ranks import on_ranks


@on_ranks(1, 2, 4)
def test_a_group_gathers_numbers_in_the_order_of_ranks(comm):
    group = Group(split_groups(comm))
    for repeat in range(20):
        found = group.gather(np.array([comm.rank, repeat, np.nan]))
        np.testing.assert_array_equal(
            found, [[rank, repeat, np.nan] for rank in range(comm.size)])
    assert group.gather_objects({comm.rank}) == [
        {rank} for rank in range(comm.size)]


def test_copies_of_a_group_are_the_same_and_it_cannot_be_pickled():
    group = Group(MPI.COMM_SELF)
    assert copy.copy(group) is copy.deepcopy([group])[0] is group
    with pytest.raises(TypeError, match='save it with chainer.serializers'):
        pickle.dumps(group)


@on_ranks(2, 4)
def test_waiting_for_a_rank_that_gives_up_is_an_error(comm):
    ranks = split_groups(comm)
    other, group = Group(ranks), Group(ranks)
    numbers = np.zeros(10000)
    other.gather(numbers)
    if comm.rank == 1:
        group.give_up('no more paper')
        message = 'no more paper'
    else:
        message = 'rank 1 of the group gave up: no more paper'
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            group.gather(numbers)
    # New groups of the same ranks know nothing of it.
    again = split_groups(comm)
    assert again != ranks
    assert Group(again).gather(np.ones(1)).sum() == comm.size
    assert split_groups(comm) == again


@on_ranks(2)
def test_another_group_of_ranks_that_gave_up_is_an_error(comm):
    """Messages of the failed one would be taken for its own."""
    ranks = split_groups(comm)
    group, other = Group(ranks), Group(ranks)
    if comm.rank == 1:
        group.give_up('no more paper')
    else:
        with pytest.raises(RuntimeError, match='no more paper'):
            group.gather(np.zeros(3))
    with pytest.raises(RuntimeError, match='no more paper.*model anew'):
        other.gather(np.ones(3))
