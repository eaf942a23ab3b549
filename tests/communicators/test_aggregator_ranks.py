"""Communicators some of whose ranks only sum."""
import re
from functools import partial

from chainer_fp8pipe import ProcessGrid, create_communicator
from chainer_fp8pipe.communicators import CodecCommunicator, factory
from chainer_fp8pipe.communicators.options import make_options

import numpy
import pytest
from mpi4py import MPI

from tests.ranks import on_ranks, run_script

from .helpers import (
    Model,
    average_two_models,
    check_means,
    make,
    set_gradients,
)

divide = partial(make, 'fp8', algorithm='aggregator')


@on_ranks(4)
def test_a_gradient_that_is_not_finite_is_named_and_models_do_not_mix(comm):
    communicator = divide(comm)
    if not communicator:
        return
    model = Model()
    set_gradients(model, comm.rank)
    if comm.rank == 1:
        model.p3.grad[123] = numpy.nan
    with pytest.raises(RuntimeError, match='of /p3 is not finite in fp8 on '
                       'rank 1'):
        communicator.multi_node_mean_grad(model)
    average_two_models(communicator)
    communicator.finalize()


# --- what is refused -------------------------------------------------------

def with_another_period(comm):
    divide(comm, period=7 if comm.rank == 2 else 100)


def alone(comm):
    divide(MPI.COMM_SELF)


def the_class_itself(comm):
    CodecCommunicator(comm, make_options('float32', {
        'algorithm': 'aggregator'}))


def a_grids_axis(comm):
    """A pipeline would wait for the stages of another for ever."""
    grid = ProcessGrid(comm, pipeline=2)
    try:
        create_communicator('fp8', grid.data, algorithm='aggregator')
    finally:
        grid.free()


@pytest.mark.parametrize(('make', 'message'), [
    (with_another_period, 'option period .* is 100 on rank 0 but 7 on rank 2'),
    (the_class_itself, 'these 4 ranks have no aggregators.*'
     'create_communicator'),
    (partial(divide, aggregators=4),
     'aggregators=4 leaves no worker of 4 ranks.*pass fewer'),
    (partial(divide, aggregators=10), 'aggregators=10 leaves no'),
    (alone, 'leaves no worker of 1 ranks'),
    (a_grids_axis, 'needs all ranks.* 2 of 4; leave mpi_comm out')])
@on_ranks(4)
def test_all_ranks_refuse(comm, make, message):
    with pytest.raises(ValueError, match=message):
        make(comm)


@on_ranks(4)
def test_options_that_do_not_fit_the_workers_let_aggregators_go(comm):
    """Two to a node were right for all four ranks; three are left."""
    if comm.rank == 3:
        assert divide(comm, ranks_per_node=2) is None
    else:
        with pytest.raises(ValueError, match='ranks_per_node=2 does not '
                           'divide the 3 ranks'):
            divide(comm, ranks_per_node=2)


@on_ranks(4)
def test_a_part_of_the_workers_is_made_without_aggregators(comm):
    communicator = divide(comm)
    if not communicator:
        return
    with pytest.raises(ValueError, match='serve all 3 workers.*'
                       r'comm\.mpi_comm\.Split\(color, key\)'):
        communicator.split(comm.rank % 2, comm.rank)
    with pytest.raises(ValueError, match='all ranks: .*works with '
                       r'aggregators.*finalize\(\)'):
        divide(communicator.mpi_comm)
    part = create_communicator(
        'float32', communicator.mpi_comm.Split(comm.rank % 2))
    assert part.size == (1 if comm.rank == 1 else 2)
    model = Model()
    set_gradients(model, part.rank)
    part.multi_node_mean_grad(model)
    check_means(model, part.size, 1e-5)
    communicator.finalize()


@on_ranks(3)
def test_ranks_that_sum_cannot_be_in_another_communicator(comm):
    with pytest.MonkeyPatch.context() as patch:     # in the ranks' process
        patch.setattr(factory, '_aggregators', set())
        if comm.rank == 2:
            with pytest.raises(SystemExit) as left:
                create_communicator('fp8', comm, algorithm='aggregator')
            assert left.value.code == 0
            return
        communicator = create_communicator('fp8', comm,
                                           algorithm='aggregator')
        for name in ('float32', 'naive'):
            with pytest.raises(ValueError, match='only sum .*: 2; pass '
                               'mpi_comm=comm.mpi_comm'):
                create_communicator(name, comm)
        assert create_communicator(
            'float32', communicator.mpi_comm).size == 2
        communicator.finalize()


# --- programs --------------------------------------------------------------

SCRIPT = """
import os, signal, sys
import chainer_fp8pipe, chainer, chainermn, numpy
import chainer.functions as F
import chainer.links as L
from mpi4py import MPI
world = MPI.COMM_WORLD.rank
if world == {dying} and {dying} > 1:    # an aggregator, soon
    import threading, time
    threading.Timer(.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
comm = chainer_fp8pipe.create_communicator(
    'fp8', algorithm='aggregator', aggregators=1, warmup=2)
model = chainer.Sequential(L.Linear(20, 10), L.Linear(10, 1))
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(0.01), comm).setup(model)
x = numpy.random.RandomState(comm.rank).rand(8, 20).astype('f')
for step in range({steps}):
    optimizer.update(lambda: F.mean_squared_error(model(x), x[:, :1]))
    if step == 5 and world == {dying}:
        {how}
same = comm.mpi_comm.allgather(model[0].W.array.tobytes())
if comm.rank == 0:
    print(comm.size, 'workers,', len(set(same)), 'model')
{end}
"""


IN_THE_MIDDLE = """
        from chainer_fp8pipe.allreduce import aggregator
        from chainer_fp8pipe.allreduce.engine import Bucket
        from chainer_fp8pipe.codecs import Cast, Tensors
        big = numpy.zeros(10 ** 7, 'f')
        state, tensors = Cast('float32').init(), Tensors(
            ['a'], [big], [big])
        state.codec.step(state, tensors)
        aggregator._working[0].submit(Bucket(state, tensors, big))
        sys.exit(0)"""
NO_ORDER = """
        from chainer_fp8pipe.allreduce import aggregator
        aggregator._working[0]._everyone.Send(b'no order', 2)"""


@pytest.mark.parametrize(('given', 'code', 'printed', 'errors'), [
    ({'end': 'del comm, optimizer'}, 0, '^2 workers, 1 model\n$', '^$'),
    ({'end': 'sys.exit(3 if comm.rank else 0)',
      'before': ['-m', 'chainer_fp8pipe', 'run']}, 3, '', ''),
    ({'dying': 1, 'how': "raise ValueError('so it goes')"}, None, '',
     'rank 1 of 3 failed(?s:.*)ValueError: so it goes'),
    ({'dying': 0, 'steps': 100, 'how': NO_ORDER}, None, '',
     'rank 2 of 3 failed(?s:.*)aggregator.py'),
    ({'dying': 0, 'steps': 6, 'how': IN_THE_MIDDLE}, None, '',
     'rank 0 of 3 left in the middle of an all-reduce'),
    ({'dying': 2, 'steps': 10 ** 9}, None, '9', '')])
def test_the_end_of_a_program_is_that_of_all_ranks(tmp_path, given, code,
                                                   printed, errors):
    path = tmp_path / 'script.py'
    path.write_text(SCRIPT.format(**{
        'end': '', 'dying': -1, 'how': 'pass', 'steps': 10, **given}))
    done = run_script(3, *given.get('before', ()), path)
    if code is None:
        assert done.returncode != 0
    else:
        assert done.returncode == code
    if printed == '9':      # SIGKILL; launchers say it in one or the other
        assert '9' in done.stdout + done.stderr
    else:
        assert re.search(printed, done.stdout)
    assert re.search(errors, done.stderr)
