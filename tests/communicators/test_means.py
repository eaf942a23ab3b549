"""The mean, with the same bits, whatever way bytes and work take."""
import contextlib
import os

from chainer_fp8pipe.allreduce import memory
from chainer_fp8pipe.codecs import CODECS

import numpy
import pytest

from tests.allreduce.library import refused, unbuffered
from tests.images.processes import memory_of
from tests.ranks import on_ranks

from .helpers import (
    Model,
    bits,
    bits_of_updates,
    make,
    mean_gradients,
    set_gradients,
)

#: Around a record of 32, and more than a frame has.
SHAPES = (1,), (31,), (32,), (33,), (), (3, 5, 7), (2000,)
#: Of an update's mean of normal gradients, relative; fp8_paper truncates at
#: every sum and clips above the quantile, so only its bits are checked.
ERRORS = {'float32': 1e-6, 'float16': 2e-3, 'bfloat16': 1e-2, 'fp8': .2,
          'int4': .5}
ALGORITHMS = {
    'direct': {'algorithm': 'direct'}, 'ring': {'algorithm': 'ring'},
    'torus2d': {'algorithm': 'torus2d'},
    'mpi_op': {'algorithm': 'mpi_op'}, 'aggregator': {
        'algorithm': 'aggregator', 'aggregators': 1}}
#: Of four ranks; three are alone on their hosts.
TWO_LEVELS = {'ranks_per_node': 2, 'two_level': 'yes'}
NODES = {'torus2d': {'shape': (2, 2)},
         'aggregator': {**TWO_LEVELS, 'ranks_per_node': 3}}
#: None of them changes a bit.
SAME = [({}, contextlib.nullcontext),
        ({'frame_bytes': 129}, contextlib.nullcontext),
        ({'frame_bytes': 0, 'shared_memory': False}, contextlib.nullcontext),
        ({'frame_bytes': 256}, unbuffered)]


def error(found, mean):
    """Of all gradients together, relative."""
    true = numpy.concatenate([mean[name].ravel() for name in sorted(mean)])
    return numpy.linalg.norm(found - true) / numpy.linalg.norm(true)


@pytest.mark.parametrize('algorithm', ALGORITHMS)
@pytest.mark.parametrize('name', CODECS)
@on_ranks(3, 4)
def test_all_ranks_get_the_mean_with_the_same_bits(comm, name, algorithm):
    """Whether MPI buffers messages or not, too."""
    if (name, algorithm) == ('int4', 'mpi_op') or (
            comm.size == 3 and name in ('float16', 'bfloat16')):
        return      # the one is refused, and float32 is a cast, too
    by_frames, found = algorithm != 'mpi_op', []
    way = {**ALGORITHMS[algorithm], **(
        NODES.get(algorithm, TWO_LEVELS) if comm.size == 4 else {})}
    for options, library in SAME if by_frames else SAME[:1]:
        with library():
            communicator = make(name, comm, **{
                **({'frame_bytes': 700} if by_frames else {}), **way,
                **options})
            if communicator is None:
                continue
            workers = communicator.mpi_comm.Dup()
            found.append(bits_of_updates(communicator, SHAPES))
        assert len({*workers.allgather(b''.join(found[-1]))}) == 1
        assert found[-1] == found[0]
    for step, one in enumerate(found[0] if found else ()):
        assert error(numpy.frombuffer(one, 'f4'), mean_gradients(
            workers.size, step, shapes=SHAPES)) < ERRORS.get(name, 9)


@pytest.mark.parametrize('name', ['float32', 'int4'])
@on_ranks(2, 3)
def test_no_message_of_mpis_is_sent_inside_a_node(comm, name):
    """A library that cannot send anything would not be missed."""
    with refused():
        communicator = make(name, comm)
    model = Model(SHAPES)
    set_gradients(model, comm.rank)
    communicator.multi_node_mean_grad(model)
    assert len(set(comm.allgather(bits(model)))) == 1


@pytest.mark.parametrize('case', ['none', 'unread', 'elsewhere', 'mistaken'])
@on_ranks(2)
def test_ranks_that_cannot_read_each_other_send_messages(comm, case):
    """One has none, is of another host, or a file's number is another's."""
    process = os.getpid()
    with pytest.MonkeyPatch.context() as patch:
        if case == 'elsewhere':
            patch.setattr(memory, '_machine', lambda: f'host {comm.rank}')
        elif comm.rank and case == 'none':
            patch.delattr(os, 'memfd_create')
        elif comm.rank and case == 'unread':
            patch.setattr(memory.SharedMemory, '_open', lambda *args: 0)
        elif comm.rank:
            patch.setattr(os, 'urandom', bytes)
            patch.setattr(os, 'getpid', lambda: 1)
        before = memory_of(process)
        communicator = make('fp8', comm)
        assert case != 'elsewhere' or memory_of(process) <= before
        without = bits_of_updates(communicator, SHAPES)
    assert without == bits_of_updates(make('fp8', comm), SHAPES)


def error_of_many(comm, name, updates=60, scales=(1.0,), moves=False,
                  **options):
    """Of the mean over updates of the same gradients.

    With ``moves`` parameters change at every update, and so do the largest
    gradients, which set fp8's scale, and are left out.
    """
    communicator = make(name, comm, **options)
    model, found = Model(SHAPES), 0.0
    true = mean_gradients(comm.size, shapes=SHAPES)
    for step in range(updates):
        set_gradients(model, comm.rank)
        scale = scales[step % len(scales)]
        for parameter in model.params():
            parameter.grad *= numpy.float32(scale)
            parameter._loss_scale = scale
        if moves:
            model.p6.grad[:100] *= 1 + step % 5
            model.p6.array += numpy.random.default_rng(step).normal(
                0, .002, 2000).astype('f4')
        communicator.multi_node_mean_grad(model)
        if moves:
            model.p6.grad[:100] = true['/p6'][:100] * scale
        found = found + numpy.frombuffer(bits(model), 'f4').astype(
            float) / scale
    communicator.finalize()
    return error(found / updates, true)


@pytest.mark.parametrize(('name', 'options'), [
    ('int4', {}), ('fp8', {'period': 1})])
@on_ranks(1, 3)
def test_what_one_update_leaves_out_the_next_ones_bring(comm, name, options):
    """Whatever the loss scale is and becomes."""
    for moves in False, True:
        without = error_of_many(comm, name, 2, moves=moves,
                                error_feedback=False, **options)
        assert .02 < without < .2
        assert error_of_many(comm, name, moves=moves, **options) < (
            without / (4 if moves else 10))
    for scales in (2.0 ** 16,), (1.0, 1000.0, 2.0 ** 20, 3.0), (1e-3, 1e6):
        assert error_of_many(comm, name, scales=scales) < .01
