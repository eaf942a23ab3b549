"""Predictions for hosts that are not there, on links that nothing but bytes
keeps busy: what is measured does not count.
"""
from chainer_fp8pipe.planner.forecast import Forecast

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.ranks import on_ranks

#: Bytes per second: the exchange of the model takes years.
SLOW = 1e-3
#: Seconds of what is measured, at the most: a test that takes longer is ended.
LONGEST = 400.0


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.hidden = L.Linear(64, 300)
            self.output = L.Linear(300, 10)

    def forward(self, x):
        return F.sum(self.output(F.relu(self.hidden(x))))


ELEMENTS = 64 * 300 + 300 + 300 * 10 + 10
BATCH = numpy.ones((4, 64), 'f')


def forecast(comm, codecs, model=None, batch=BATCH, **options):
    return Forecast(comm, Net() if model is None else model, batch, **{
        'rate': SLOW, 'codecs': codecs, **options})


@on_ranks(1, 2, 4)
def test_an_update_takes_as_long_as_its_bytes_take(comm):
    found = forecast(comm, ('float32', 'fp8'))
    assert found.hosts == comm.size
    # Each rank has 1 - 1 / n of the sums and of the means to send.
    whole = 2 * (1 - 1 / comm.size) * 4 * ELEMENTS / SLOW
    for algorithm in 'direct', 'ring':
        step = found.step('float32', algorithm=algorithm, overlap=True)
        assert step.seconds.value == pytest.approx(
            whole, rel=0.02, abs=LONGEST)
        assert comm.allgather(step) == [step] * comm.size
    step = found.step('fp8', warmup=7, seed=3)
    assert step.parts['exchange'] == pytest.approx(
        whole / 4, rel=0.05, abs=LONGEST)


@on_ranks(2)
def test_the_exchange_of_another_model_is_of_its_size(comm):
    found = forecast(comm, ('fp8', 'float32'))
    for name, size in (('float32', 4), ('fp8', 1)):
        seconds = found.exchange(name, 1_000_000, 10)
        assert seconds == pytest.approx(size * 1e6 / SLOW, rel=0.02)


@on_ranks(2)
def test_a_latency_is_that_of_the_agreement_and_the_messages(comm):
    found = forecast(comm, ('float32',), rate=1e12, latency=1e6)
    # One round of two ranks that agree, one of sums and one of means.
    assert found.step('float32').parts['exchange'] == pytest.approx(
        3e6, abs=LONGEST)


@on_ranks(1)
@pytest.mark.parametrize(('name', 'options'), [
    ('fp8_paper', {}), ('naive', {}), ('fp8', {'algorithm': 'mpi_op'}),
    ('fp8', {'rounding': 'stochastic'})])
def test_what_the_prediction_does_not_know_is_not_predicted(
        comm, name, options):
    found = forecast(comm, ('fp8',))
    assert found.step(name, **options) is None
    with pytest.raises(ValueError, match="'float32' was not measured"):
        found.step('float32')
    if not options:
        with pytest.raises(ValueError, match='is not predicted; these are'):
            found.exchange(name, 100, 1)


@on_ranks(2)
def test_the_model_stays_as_it_is(comm):
    def bits():
        return {name: (one.array.tobytes(), one.grad.tobytes())
                for name, one in model.namedparams()}
    model = Net()
    before = bits()
    forecast(comm, ('float32',), model,
             optimizer=chainer.optimizers.MomentumSGD())
    assert bits() == before


class Failing(Net):
    def forward(self, x):
        raise KeyError('lost')


@on_ranks(4)
def test_a_model_that_fails_is_an_error_on_all_ranks(comm):
    with pytest.raises(RuntimeError, match='lost'):
        forecast(comm, ('float32',), Failing())


@on_ranks(2)
def test_arrays_of_unequal_lengths_on_one_rank_are_an_error_on_all(comm):
    batch = BATCH, numpy.ones(4 - comm.rank, 'f')
    with pytest.raises(ValueError, match='rank 1: .*first axis'):
        forecast(comm, ('float32',), batch=batch)
