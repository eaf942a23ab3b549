"""What a failure looks like to who started the job."""

import pytest

from tests.ranks import run_script

SCRIPT = '''
import chainer_fp8pipe
from chainer_fp8pipe import Divisible, PipelineUpdater
import chainer, sys
import chainer.links as L
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD

def broken(x):
    raise ArithmeticError('in the second stage')

def extension(trainer):
    if comm.rank == 0:
        raise OSError('disk full')

bad = broken if sys.argv[1] == 'layer' else L.Linear(3, 3)
model = Divisible(L.Linear(4, 3), bad).stage(comm, balance='layers')
if sys.argv[1] == 'between' and comm.rank == 1:
    raise OSError('no more paper')
data = chainer.datasets.TupleDataset(np.ones((8, 4), 'f'), np.zeros(8, 'i'))
updater = PipelineUpdater(
    chainer.iterators.SerialIterator(data, 4),
    chainer.optimizers.SGD().setup(model), comm, micro_batches=2)
trainer = chainer.training.Trainer(updater, (2, 'epoch'), sys.argv[2])
if sys.argv[1] == 'extension':
    trainer.extend(extension, trigger=(1, 'iteration'))
trainer.run()
'''


@pytest.fixture
def script(tmp_path):
    path = tmp_path / 'train.py'
    path.write_text(SCRIPT)
    return lambda *arguments: run_script(2, path, *arguments, tmp_path / 'out',
                                         timeout=300)


def test_a_stage_that_raises_ends_the_job_with_its_own_traceback_first(script):
    done = script('layer')
    assert done.returncode
    first = done.stderr.index('rank 1 of 2 failed')
    assert done.stderr.index("in broken\n") > first
    assert done.stderr.index('in the second stage') < done.stderr.index(
        'Exception in main training loop')
    assert 'layer 1 (broken), micro-batch 0' in done.stderr
    assert 'RemoteError: rank 1: layer 1 (broken)' in done.stderr


@pytest.mark.parametrize(('place', 'said'), [
    ('extension', 'disk full'), ('between', 'no more paper')])
def test_what_raises_outside_of_a_step_ends_the_job(script, place, said):
    """In an extension, or between ``stage`` and the updater."""
    done = script(place)
    assert done.returncode
    assert f'OSError: {said}' in done.stderr
