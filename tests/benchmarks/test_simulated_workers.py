"""Simulated workers leave what ranks leave."""
from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.codecs import BlockScaled, Fp8Ratio

import numpy
import pytest

from benchmarks.simulated_workers import SimulatedWorkers
from tests.communicators.helpers import Model, set_gradients
from tests.ranks import on_ranks

SHAPES = (1,), (33,), (), (3, 5, 7), (6000,)
CODECS = {'fp8': (lambda rank: Fp8Ratio(), {'warmup': 0}),
          'int4': (lambda rank: BlockScaled(ranks=2), {'warmup': 0}),
          'float32': (None, {})}


@pytest.mark.parametrize('codec', CODECS)
@on_ranks(2)
def test_two_of_them_have_the_bits_of_two_ranks(comm, codec):
    """Of two contributions the order in a sum makes no difference."""
    make, options = CODECS[codec]
    # All in one bucket, of which each rank owns a half, as in there.
    communicator = create_communicator(codec, comm, bucket_bytes=0, **options)
    simulated, model = SimulatedWorkers(make, 2), Model(SHAPES)
    names, parameters = zip(*sorted(model.namedparams()), strict=True)
    for step in range(4):
        gradients = [list(set_gradients(Model(SHAPES), rank, step).values())
                     for rank in range(2)]
        means = simulated.average(
            names, gradients, [parameter.array for parameter in parameters],
            warm=True)
        set_gradients(model, comm.rank, step)
        communicator.multi_node_mean_grad(model)
        for parameter, mean in zip(parameters, means, strict=True):
            numpy.testing.assert_array_equal(parameter.grad, mean)


def test_a_warm_up_is_the_mean_itself():
    values = numpy.random.default_rng(0).normal(0, 1, (3, 2, 40)).astype('f')
    simulated = SimulatedWorkers(lambda rank: BlockScaled(ranks=2), 3)
    found = simulated.average(['a', 'b'], values, list(values[0]), warm=False)
    numpy.testing.assert_allclose(found, values.mean(0), rtol=1e-6)
