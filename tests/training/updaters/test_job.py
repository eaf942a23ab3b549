"""What a failure looks like to who started the job."""
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

model = Divisible(L.Linear(4, 3), broken).stage(comm, balance='layers')
data = chainer.datasets.TupleDataset(np.ones((8, 4), 'f'), np.zeros(8, 'i'))
updater = PipelineUpdater(
    chainer.iterators.SerialIterator(data, 4),
    chainer.optimizers.SGD().setup(model), comm, micro_batches=2)
chainer.training.Trainer(updater, (2, 'epoch'), sys.argv[1]).run()
'''


def test_a_stage_that_raises_ends_the_job_with_its_own_traceback_first(
        tmp_path):
    path = tmp_path / 'train.py'
    path.write_text(SCRIPT)
    done = run_script(2, path, tmp_path / 'out', timeout=300)
    assert done.returncode
    first = done.stderr.index('rank 1 of 2 failed')
    assert done.stderr.index("in broken\n") > first
    assert done.stderr.index('in the second stage') < done.stderr.index(
        'Exception in main training loop')
    assert 'layer 1 (broken), micro-batch 0' in done.stderr
    assert 'RemoteError: rank 1: layer 1 (broken)' in done.stderr
