"""All-reduce through ranks that only sum."""
from chainer_fp8pipe.allreduce.aggregator import dismiss, serve
from chainer_fp8pipe.codecs import Cast

import numpy
import pytest
from mpi4py import MPI

from tests.mpi.scarcity import communicators_left
from tests.ranks import on_ranks

from .helpers import bucket_of, exchange, mean_of, on_workers, tensors_of
from .library import recorded, unbuffered


@on_ranks(3)
def test_one_worker_may_be_a_bucket_ahead_of_the_others(comm):
    """The aggregator must not sum where results still wait to be sent."""
    def body(algorithm, workers):
        buckets = []
        for step in range(20):
            tensors = tensors_of(workers.rank, [100], step)
            wire = tensors.gradients[0] / numpy.float32(workers.size)
            buckets.append(algorithm.submit(
                bucket_of(Cast('float32'), tensors, wire)))
            while workers.rank == 0 and len(buckets) > 1 and (
                    not buckets[-2].finished):
                algorithm.work()
        algorithm.finish_all()
        for step, bucket in enumerate(buckets):
            numpy.testing.assert_allclose(
                bucket.wire, mean_of(workers.size, [100], step), rtol=0,
                atol=1e-6)
    with unbuffered():
        on_workers(comm, body)


# --- cut-through -----------------------------------------------------------

@pytest.mark.parametrize('frame_bytes', [400, 1 << 60])
@on_ranks(4)
def test_a_whole_frame_is_summed_before_any_of_it_is_sent(comm, frame_bytes):
    """With frames that hold a vector, that is store and forward."""
    def body(algorithm, workers):
        codec = Cast('float32').init()
        tensors = tensors_of(workers.rank, [10000])
        for _ in range(3):
            exchange(algorithm, codec, tensors)
    events = []
    with recorded(events):
        on_workers(comm, body, frame_bytes=frame_bytes)
    if comm.rank < 3:
        return
    chunks = 1 if frame_bytes > 40000 else 100
    size = 40000 // chunks
    assert set(events) == {('receive', size), ('send', size)}
    assert len(events) == 3 * 2 * 3 * chunks
    # Receives are posted when a chunk starts; at most 3 are under way.
    received = [sum(kind == 'receive' for kind, _ in events[:place])
                for place, (kind, _) in enumerate(events) if kind == 'send']
    assert received[0] == (3 if chunks == 1 else 9)
    if chunks == 1:
        assert received == [3] * 3 + [6] * 3 + [9] * 3
    else:
        # Results leave while nearly all of the vector is still to come.
        assert received == sorted(received)
        assert sum(count < 3 * chunks for count in received) > 250


# --- leaving ---------------------------------------------------------------

@on_ranks(3)
def test_aggregators_leave_though_there_was_no_bucket_or_no_order(comm):
    on_workers(comm, lambda algorithm, workers: None)
    everyone = comm.Dup()
    if comm.rank == 2:
        serve(everyone)
    else:
        dismiss(everyone, 2)
    assert everyone == MPI.COMM_NULL


@on_ranks(2)
def test_communicators_are_given_back_to_mpi(comm):
    with communicators_left(comm, 30):
        for _ in range(20):     # of several each
            on_workers(comm, lambda algorithm, workers: None)
