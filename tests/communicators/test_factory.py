from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.communicators import CodecCommunicator

import numpy
import pytest

from tests.ranks import on_ranks


@on_ranks(2)
def test_chainermns_own_communicators_are_made_by_their_names(comm):
    made = create_communicator('naive', comm)
    assert (type(made).__name__, made.size) == ('NaiveCommunicator', 2)


@on_ranks(2)
def test_the_default_is_fp8_over_all_ranks(comm):
    made = create_communicator()
    assert isinstance(made, CodecCommunicator)
    assert (made.name, made.size) == ('fp8', comm.size)


@on_ranks(1)
def test_an_unknown_name_lists_the_known_ones(comm):
    with pytest.raises(ValueError, match="'fp9'.*fp8, fp8_paper, int4, int5, "
                       'float16, float32, torus2d, naive'):
        create_communicator('fp9')


@on_ranks(1)
def test_chainermns_communicators_take_only_chainermns_options(comm):
    with pytest.raises(ValueError, match="'naive' has no option 'warmup'"):
        create_communicator('naive', warmup=3)


@on_ranks(1)
def test_something_that_is_no_mpi_communicator_is_named(comm):
    with pytest.raises(TypeError, match='mpi_comm'):
        create_communicator('fp8', mpi_comm='world')


@on_ranks(4)
def test_a_part_of_a_torus_chooses_a_shape_itself(comm):
    whole = create_communicator('torus2d', comm,
                                shape=(numpy.int64(2), numpy.int64(2)))
    part = whole.split(comm.rank % 2, comm.rank)
    assert part.size == 2
    part.finalize()
    whole.finalize()
