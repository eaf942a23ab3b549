from chainer_fp8pipe.pipeline.channels import Channels
from chainer_fp8pipe.pipeline.randomness import Place
from chainer_fp8pipe.pipeline.schedules import make_schedule
from chainer_fp8pipe.pipeline.stage_executor import StageExecutor
from chainer_fp8pipe.report.stream import EventStream

import numpy as np
import pytest
from mpi4py import MPI


class Noting:
    """In place of a chunk and of the loss: notes what it is asked for."""

    recompute = False

    def __init__(self):
        self.seen = []

    def forward(self, micro_batch, arrays, place):
        return arrays

    def backward(self, micro_batch, gradients=(), defer=False, last=False):
        self.seen.append(f'{"I" if defer else "B"}{micro_batch}')
        return gradients

    def backward_weight(self, micro_batch, last=False):
        self.seen.append(f'W{micro_batch}')

    def settle(self):
        self.seen.append('settle')


@pytest.mark.parametrize(('name', 'micro_batches', 'expected'), [
    ('gpipe', 1, 'B0 settle'), ('gpipe', 2, 'B0 settle B1 settle'),
    ('gpipe', 4, 'B0 B1 B2 settle B3 settle'),
    ('1f1b', 4, 'B0 B1 B2 settle B3 settle'),
    ('zero_bubble', 4, 'I0 W0 I1 W1 I2 W2 settle I3 W3 settle')])
def test_the_last_micro_batch_is_by_itself(name, micro_batches, expected):
    chunk, loss = Noting(), Noting()
    executor = StageExecutor({0: chunk}, Channels(MPI.COMM_SELF, [0], 0), 0, 1,
                        EventStream())
    executor.run(make_schedule(name, 1, micro_batches), 0,
                 [(np.ones(2, 'f'),)] * micro_batches,
                 [Place(0, 0, 0, 0)] * micro_batches, loss, train=True)
    assert ' '.join(chunk.seen) == expected
