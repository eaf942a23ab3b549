from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.pipeline.group_failures import give_up, hear_failures

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainermn.links import MultiNodeBatchNormalization

from tests.ranks import on_ranks


class Group:
    """Of ranks that normalise together."""

    def __init__(self):
        self.heard = []

    def give_up(self, text):
        self.heard.append(text)


def test_ranks_that_normalise_with_one_that_fails_hear_of_it():
    model = chainer.Sequential(L.BatchNormalization(2), L.Linear(2),
                               L.BatchNormalization(2))
    model[2].group = model[1].group = Group()
    give_up(model, 'no more paper')
    assert model[2].group.heard == ['no more paper']


def normalised(link, x):
    """Outputs and gradients of a batch."""
    x = chainer.Variable(x)
    link.cleargrads()
    y = link(x)
    F.sum(y ** 3).backward()
    return y.array, x.grad, link.gamma.grad, link.beta.grad, link.avg_var


@on_ranks(1, 2, 3)
def test_multi_node_batch_normalisation_is_what_it_was(comm):
    random = np.random.RandomState(comm.rank)
    ranks = create_communicator('float32', comm)
    model = chainer.Sequential(*(
        MultiNodeBatchNormalization(3, ranks) for _ in range(2)))
    serial = MultiNodeBatchNormalization(3, ranks)
    for again in range(2):
        hear_failures(model)        # the second time, too
        x = random.rand(5, 3).astype('f') + again
        for found, expected in zip(normalised(model[0], x),
                                   normalised(serial, x), strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert model[0].comm is model[1].comm
    assert model[0].comm.rank == comm.rank      # as ChainerMN's


@on_ranks(2)
def test_who_waits_in_multi_node_batch_normalisation_hears_of_a_failure(comm):
    model = chainer.Sequential(MultiNodeBatchNormalization(
        3, create_communicator('float32', comm)))
    hear_failures(model)
    if comm.rank:
        give_up(model, 'no more paper')
    else:
        with pytest.raises(RuntimeError, match='rank 1 .*no more paper'):
            model(np.ones((2, 3), 'f'))
