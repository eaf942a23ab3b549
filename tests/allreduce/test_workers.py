"""Threads that encode, sum and decode: the same bits, and nothing left."""
import gc
import os
import threading

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.codecs import Fp8Ratio

import numpy
import pytest
from mpi4py import MPI

from tests.communicators.helpers import Model, set_gradients
from tests.ranks import on_ranks

from .helpers import average, bucket_of, make, tensors_of
from .library import refused

SHAPES = (1,), (33,), (), (3, 5, 7), (90_000,)
#: Small frames, so that many tasks wait.
SMALL = {'frame_bytes': 700}


@on_ranks(2)
def test_what_threads_find_is_counted_once(comm):
    """Clipped elements, and tensors that are not finite."""
    found = []
    for threads in (1, 4):
        communicator = create_communicator(
            'fp8', comm, warmup=0, headroom=1.0, threads=threads,
            nonfinite='raise', **SMALL)
        model = Model(SHAPES)
        for step in range(2):
            set_gradients(model, comm.rank, step)
            communicator.multi_node_mean_grad(model)
        found.append([(report.clipped, report.encoded) for report
                      in communicator.report(model).values()])
        if comm.rank == 1:
            model.p4.grad[77_777] = numpy.nan
        with pytest.raises(RuntimeError, match='/p4.*rank 1'):
            communicator.multi_node_mean_grad(model)
        communicator.finalize()
    assert found[0] == found[1]
    assert sum(clipped for clipped, _ in found[0]) > 0


def engine(comm, threads):
    return make('direct', comm, frame_bytes=256, frames_in_flight=6,
                shared_memory=False, threads=threads)


def threads_of_this_process():
    return len(os.listdir('/proc/self/task'))


@pytest.mark.skipif(not os.path.exists('/proc/self/task'),
                    reason='threads are counted in /proc')
@on_ranks(1, 2)
def test_all_engines_have_the_same_threads(comm):
    """As many as any has wanted; the first may have been freed."""
    before = [engine(comm, 4)]      # jobs are kept from test to test
    threads = threads_of_this_process()
    made = [engine(comm, 3), *before]
    made += [made[0].another(), engine(comm, 4), engine(comm, 1)]
    assert threads_of_this_process() == threads
    made.pop(0).free()
    gc.collect()
    tensors = tensors_of(comm.rank, [50_000])
    for one in made:
        average(one, bucket_of(Fp8Ratio(), tensors).coding,
                numpy.zeros(50_000, numpy.uint8))
        one.free()
    assert threads_of_this_process() == threads


@on_ranks(2)
def test_after_an_error_no_thread_touches_what_it_was_given(comm):
    with refused():
        made = engine(comm, 3)
    bucket = made.submit(bucket_of(Fp8Ratio(), tensors_of(
        comm.rank, [50_000]), encodes=True, decodes=True))
    with pytest.raises(MPI.Exception):
        made.finish_all()
    wire = bucket.wire.copy()
    threading.Event().wait(.05)
    numpy.testing.assert_array_equal(bucket.wire, wire)
    with pytest.raises(RuntimeError, match='half done'):
        made.advance()


@on_ranks(1)
def test_a_fork_of_a_rank_ends_without_its_threads(comm):
    made = engine(comm, 3)
    child = os.fork()
    if not child:
        del made
        gc.collect()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    made.free()
