"""Ranks that read each other's memory get the bits that messages bring."""
from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.allreduce import memory
from chainer_fp8pipe.communicators.options import without_warmup

import pytest

from tests.allreduce.library import refused
from tests.ranks import on_ranks

from .helpers import Model, bits, bits_of_updates, set_gradients

SHAPES = (1,), (33,), (), (3, 5, 7), (60_000,)
NAMES = 'float32', 'float16', 'fp8', 'int4'
WAYS = [{}, {'algorithm': 'ring'}, {'algorithm': 'torus2d', 'shape': (2, 2)},
        {'ranks_per_node': 2}, {'frame_bytes': 0}, {'frame_bytes': 500},
        {'bucket_bytes': 4000}, {'overlap': True},
        {'overlap': 'next_forward'}]


def results(comm, name, shared, way):
    """Bits of three updates' means."""
    return bits_of_updates(create_communicator(
        name, comm, shared_memory=shared, **without_warmup(name), **way),
        SHAPES)


@pytest.mark.parametrize('way', WAYS, ids=str)
@pytest.mark.parametrize('name', NAMES)
@on_ranks(4)
def test_the_same_bits_come_both_ways(comm, name, way):
    assert results(comm, name, True, way) == results(comm, name, False, way)


@pytest.mark.parametrize('name', NAMES)
@on_ranks(2, 3)
def test_no_message_of_mpis_is_sent_inside_a_node(comm, name):
    """A library that cannot send anything would not be missed."""
    with refused():
        communicator = create_communicator(name, comm,
                                           **without_warmup(name))
    model = Model(SHAPES)
    set_gradients(model, comm.rank)
    communicator.multi_node_mean_grad(model)
    assert len(set(comm.allgather(bits(model)))) == 1


@on_ranks(2)
def test_ranks_that_cannot_read_each_other_send_messages(comm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, '_opened', lambda *names: 0)
        assert results(comm, 'fp8', True, {}) == results(
            comm, 'fp8', False, {})
