"""Bytes and work take many ways, none of which changes a bit of a mean."""
from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.allreduce import memory
from chainer_fp8pipe.communicators.options import without_warmup

import numpy
import pytest

from tests.allreduce.library import refused
from tests.ranks import on_ranks

from .helpers import (
    Model,
    bits,
    bits_of_updates,
    mean_gradients,
    set_gradients,
)

#: Around a record of 32, and more than a frame has.
SHAPES = (1,), (31,), (32,), (33,), (), (3, 5, 7), (60_000,)
RING, TORUS = {'algorithm': 'ring'}, {'algorithm': 'torus2d', 'shape': (2, 2)}
NODES, WHOLE = {'ranks_per_node': 2}, {'frame_bytes': 0}
#: Each option with two formats.
WAYS = [('fp8', way) for way in (
    {}, RING, TORUS, NODES, {'overlap': True},
    {'error_feedback': False}, {**RING, 'partial_sums': 'float32'})] + [
        ('int4', way) for way in (
            {}, RING, TORUS, NODES, WHOLE, {'bucket_bytes': 4000},
            {'overlap': True})] + [
        ('float16', {}), ('float16', {**NODES, 'bucket_bytes': 4000}),
        ('float32', RING),
        ('float32', WHOLE)]


def make(comm, name, **options):
    return create_communicator(
        name, comm, **without_warmup(name), **options)


def results(comm, name, way, **options):
    """Bits of three updates' means, which travel in many small frames."""
    return bits_of_updates(
        make(comm, name, **{'frame_bytes': 700, **way}, **options), SHAPES)


def error(found, mean):
    """Of all gradients together, relative."""
    true = numpy.concatenate([mean[name].ravel() for name in sorted(mean)])
    return numpy.linalg.norm(found - true) / numpy.linalg.norm(true)


@pytest.mark.parametrize(('name', 'way'), WAYS, ids=str)
@on_ranks(4)
def test_shared_memory_changes_no_bit(comm, name, way):
    alone = results(comm, name, way)
    assert results(comm, name, way, shared_memory=False) == alone
    assert set(map(tuple, comm.allgather(alone))) == {tuple(alone)}
    for step, found in enumerate(alone):
        assert error(numpy.frombuffer(found, 'f4'), mean_gradients(
            4, step, shapes=SHAPES)) < .5


@pytest.mark.parametrize('name', ['float32', 'int4'])
@on_ranks(2, 3)
def test_no_message_of_mpis_is_sent_inside_a_node(comm, name):
    """A library that cannot send anything would not be missed."""
    with refused():
        communicator = make(comm, name)
    model = Model(SHAPES)
    set_gradients(model, comm.rank)
    communicator.multi_node_mean_grad(model)
    assert len(set(comm.allgather(bits(model)))) == 1


@on_ranks(2)
def test_ranks_that_cannot_read_each_other_send_messages(comm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.SharedMemory, '_open', lambda *args: 0)
        without = results(comm, 'fp8', {}, shared_memory=True)
    assert without == results(comm, 'fp8', {})


#: Of a mean of normal gradients, relative; twice what is found.
@pytest.mark.parametrize(('name', 'options', 'most'), [
    ('int4', {}, .35)])
@on_ranks(1, 3)
def test_what_one_update_leaves_out_the_next_ones_bring(comm, name, options,
                                                        most):
    """The mean of many updates of the same gradients comes near the truth."""
    true, updates = mean_gradients(comm.size, shapes=SHAPES), 20
    for feedback in True, False:
        communicator = make(comm, name, error_feedback=feedback, **options)
        model, found = Model(SHAPES), []
        for _ in range(updates):
            set_gradients(model, comm.rank)
            communicator.multi_node_mean_grad(model)
            found.append(numpy.frombuffer(bits(model), 'f4'))
            assert error(found[-1], true) < most
        if feedback:
            assert error(numpy.mean(found, 0), true) < most / 10
        else:
            assert (found[0] == found[-1]).all()
        communicator.finalize()
