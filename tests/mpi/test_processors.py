"""Which cores a rank has for itself."""
from chainer_fp8pipe.mpi import processors
from chainer_fp8pipe.mpi.processors import cores_each, own_cores, pools_of

import pytest

from tests.ranks import on_ranks


@pytest.mark.parametrize(('cores', 'pools'), [
    ([{0}, {1}, {0}, {1}], [0, 1, 0, 1]),
    ([{0, 1}, {0, 1}], [0, 0]),
    ([{2}, {1}, {0}], [0, 1, 2]),
    # The last rank meets both.
    ([{0}, {1}, {0, 1}], [0, 0, 0]),
    ([{3}, {0}, {1}, {0, 1}], [0, 1, 1, 1]),
])
def test_ranks_with_a_core_in_common_are_in_a_pool(cores, pools):
    assert pools_of(cores) == pools


def cores(*numbers, machine='a'):
    return frozenset((machine, number) for number in numbers)


def test_own_cores_are_those_that_the_system_allows():
    assert own_cores()
    assert {number for _, number in own_cores()} == processors.core_numbers()


@pytest.mark.parametrize(('every', 'expected'), [
    # Free to run on all eight.
    ([cores(*range(8))] * 4, [2] * 4),
    ([cores(*range(8))] * 3, [2] * 3),
    # Bound to some of their own.
    ([cores(0, 1, 2), cores(3, 4, 5), cores(6), cores(7)], [3, 3, 1, 1]),
    # More ranks than cores.
    ([cores(0, 1)] * 4, [1] * 4),
    # Other machines have other cores of the same numbers.
    ([cores(0, 1), cores(0, 1), cores(0, 1, machine='b'),
      cores(4, 5, 6, machine='c')], [1, 1, 2, 3]),
])
@on_ranks(3, 4)
def test_ranks_share_the_cores_that_they_have_in_common(comm, every, expected):
    if comm.size != len(every):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processors, 'own_cores', lambda: every[comm.rank])
        patch.setattr(processors, '_LOCAL_RANKS', ())
        patch.setattr(processors.os, 'cpu_count', lambda: 8)
        assert cores_each(comm) == expected[comm.rank]


@on_ranks(2)
def test_ranks_of_other_communicators_count_where_the_launcher_says_so(comm):
    """Two stages of a pipeline, each with replicas of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processors, 'own_cores', lambda: cores(*range(8)))
        patch.setattr(processors.os, 'cpu_count', lambda: 8)
        for name in processors._LOCAL_RANKS:
            patch.delenv(name, raising=False)
        assert cores_each(comm) == 4
        patch.setenv('MPI_LOCALNRANKS', '4')
        assert cores_each(comm) == 2
        patch.setenv('MPI_LOCALNRANKS', '64')
        assert cores_each(comm) == 1
