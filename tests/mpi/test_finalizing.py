"""However a program ends, what needs MPI is done before, or is kept."""
import weakref

from chainer_fp8pipe.mpi.finalizing import HeldRequest

import numpy
import pytest
from mpi4py import MPI

from tests.ranks import on_ranks, run_script

SCRIPT = """
import atexit, contextlib, os, sys, time, warnings
warnings.simplefilter('ignore', DeprecationWarning)     # fork, from 3.12 on
import chainer_fp8pipe
import chainer, chainer.functions as F, chainer.links as L, chainermn, numpy
from chainer import _backprop
from chainer_fp8pipe.mpi import finalizing
from chainermn.optimizers import _MultiNodeOptimizer
from mpi4py import MPI
from tests.exchange.jobs import raising

def in_chainer():
    return _MultiNodeOptimizer.update, _backprop._backprop_utils

original = in_chainer()
comm = chainer_fp8pipe.create_communicator('fp8', warmup=0, {options})
model = chainer.Sequential(*[L.Linear(64, 64, initialW=numpy.eye(64) / 8)
                             for _ in range(3)])
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(), comm).setup(model)
rank = comm.rank

def loss():
    return F.sum(model(numpy.ones((4, 64), 'f')))

def update():
    optimizer.update(loss)

def fail():
    with contextlib.suppress(ZeroDivisionError):
        optimizer.update(lambda: loss() + raising(model[0].b))

def fork(action):
    child = os.fork()
    if not child:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

for _ in range(4):
    update()
{end}
if rank == 0:
    print(sum(float(abs(one.array).sum()) for one in model.params()))
"""
OVERLAP = 'overlap=True, bucket_bytes=300'
AGGREGATOR = "algorithm='aggregator'"


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """What rank 0 prints of its model in the end."""
    known = {}

    def run(options, end, ranks=2):
        if (options, end) not in known:
            path = tmp_path_factory.mktemp('script') / 'script.py'
            path.write_text(SCRIPT.format(options=options, end=end))
            done = run_script(ranks, path, timeout=300)
            assert (done.returncode, done.stderr) == (0, '')
            known[options, end] = done.stdout
        return known[options, end]
    return run


@pytest.mark.parametrize('end', [
    'comm.finalize(); comm.finalize(); atexit.register(comm.finalize)',
    'atexit.register(MPI.Finalize)', 'MPI.Finalize(); comm.finalize()'])
def test_no_update_is_lost(run, end):
    """Also what a fork does in the middle of an update that waits."""
    assert run(OVERLAP, 'fork(atexit._run_exitfuncs); fork(finalizing._work)\n'
               f'fork(comm.finalize); update()\n{end}') == run('', 'update()')


@pytest.mark.parametrize('end', [
    'if rank == 0: fail()', """
assert all(now is not then for now, then in zip(in_chainer(), original))
fail(); comm.finalize()
assert in_chainer() == original"""])
def test_what_was_sent_early_in_vain_holds_up_no_end(run, end):
    """Nor does it change the model, and nothing is left in Chainer."""
    assert run(OVERLAP, end) == run('', '')


def test_aggregators_leave_once(run):
    assert run(AGGREGATOR, 'if rank == 0: fork(atexit._run_exitfuncs)\n'
               'update(); MPI.Finalize()', 3) == run('', 'update()')


def test_what_fails_at_the_end_is_reported(tmp_path):
    path = tmp_path / 'script.py'
    path.write_text("""
import chainer_fp8pipe
from chainer_fp8pipe.mpi import finalizing
from mpi4py import MPI
chainer_fp8pipe.create_communicator('fp8')

def fail():
    raise ValueError('so it goes')
if MPI.COMM_WORLD.rank == 1:
    finalizing.before_finalize(fail)
MPI.Finalize()
""")
    done = run_script(2, path, timeout=300)
    assert done.returncode == 1
    assert 'rank 1 of 2 failed' in done.stderr
    assert 'so it goes' in done.stderr


# --- what is kept forever ----------------------------------------------------

@on_ranks(2)
@pytest.mark.parametrize('ends', [True, False])
def test_a_request_keeps_its_buffers_until_it_is_complete(comm, ends):
    array = numpy.zeros(1)
    request = HeldRequest(
        comm.Iallreduce(MPI.IN_PLACE, array) if comm.rank or ends
        else comm.Irecv(array, 1), array)
    while ends and not request.test():
        pass
    kept = weakref.ref(array)
    del array, request
    assert (kept() is None) == ends
    if comm.rank == 0 and not ends:
        comm.Iallreduce(MPI.IN_PLACE, numpy.zeros(1)).Wait()
    elif not ends:
        comm.Send(numpy.zeros(1), 0)
