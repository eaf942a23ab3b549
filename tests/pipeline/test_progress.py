"""Messages between nodes, while their sender or receiver computes."""
import pytest

from tests.ranks import run_script

# The rank that computes makes no call of MPI until it sees that the other
# one is done.
SCRIPT = '''
import pathlib, sys, time
from chainer_fp8pipe.pipeline.channel import Channels
from chainer_fp8pipe.mpi.ranks import nodes_of
import chainer, numpy
from mpi4py import MPI

comm, done = MPI.COMM_WORLD, pathlib.Path(sys.argv[2])
if nodes_of(comm) != [0, 1]:
    sys.exit('this MPI does not take one node for two')
channels = Channels(comm, 0)
arrays = numpy.arange(2 ** 20), numpy.ones((3, 5))


def compute():
    end = time.monotonic() + 200
    with channels.moving(chainer.get_device('@numpy')):
        while not done.exists() and time.monotonic() < end:
            numpy.ones(10 ** 5).sum()
    print('in time' if done.exists() else 'too late')


if comm.rank == 0:
    channels.send(arrays, 1)         # so that the next has no description
    channels.flush()
    comm.Barrier()
    channels.send(arrays, 1)
    if sys.argv[1] == 'sender':
        compute()
    channels.flush()
    if sys.argv[1] == 'receiver':
        done.touch()
else:
    channels.receive(0)
    comm.Barrier()
    if sys.argv[1] == 'receiver':
        compute()
    for one, other in zip(channels.receive(0), arrays):
        numpy.testing.assert_array_equal(one, other)
    if sys.argv[1] == 'sender':
        done.touch()
'''


@pytest.mark.parametrize('who', ['sender', 'receiver'])
def test_a_large_message_moves_while_one_side_computes(
        tmp_path, monkeypatch, who):
    # MPICH takes each rank for a node of its own, and talks over TCP.
    monkeypatch.setenv('MPIR_CVAR_NOLOCAL', '1')
    monkeypatch.setenv('UCX_TLS', 'tcp,self')
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    result = run_script(2, script, who, tmp_path / 'done')
    if 'does not take one node for two' in result.stderr:
        pytest.skip('needs MPICH, which can take one node for two '
                    '(MPIR_CVAR_NOLOCAL)')
    assert result.returncode == 0, result.stderr
    assert result.stdout.split('\n')[0] == 'in time'
