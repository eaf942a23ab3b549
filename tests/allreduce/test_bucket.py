"""The queue of buckets, where something goes wrong."""
from chainer_fp8pipe.allreduce.bucket import Bucket, BucketQueue
from chainer_fp8pipe.allreduce.mpi_op import MpiOp
from chainer_fp8pipe.codecs import Cast, Tensors
from chainer_fp8pipe.report.stream import EventStream

import numpy
import pytest
from mpi4py import MPI


class Broken(Cast):
    """Fails when a bucket is launched."""

    def step(self, *arguments):
        raise ZeroDivisionError('so it goes')


@pytest.fixture
def queue():
    algorithm = MpiOp(MPI.COMM_SELF, EventStream())
    queue = BucketQueue(MPI.COMM_SELF, algorithm, EventStream())
    yield queue
    queue.free()
    algorithm.free()


@pytest.fixture
def bucket():
    values = [numpy.ones(3, 'f4')]
    return Bucket(Broken('float32').init(), Tensors('a', values, values),
                  numpy.zeros(3, 'f4'))


def test_waiting_for_a_bucket_that_was_not_launched_is_an_error(
        queue, bucket):
    queue.submit(bucket)
    with pytest.raises(ZeroDivisionError):
        queue.advance()
    for _ in range(2):
        with pytest.raises(RuntimeError, match='not be sent.*so it goes'):
            queue.finish(bucket)


def test_the_rest_of_a_bucket_that_was_not_launched_says_why(queue, bucket):
    """And nothing that the codec keeps changes twice."""
    queue.submit(bucket, 32)
    with pytest.raises(ZeroDivisionError):
        queue.advance()
    queue.resume(bucket)
    with pytest.raises(RuntimeError, match='so it goes'):
        queue.advance()
    assert bucket.failure == "ZeroDivisionError('so it goes')"
