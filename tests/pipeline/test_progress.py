"""Messages between nodes, while their sender computes."""
import pytest

from tests.ranks import run_script

# The rank that computes makes no call of MPI until it sees that the other
# one has all.
SCRIPT = '''
import pathlib, sys, time
from chainer_fp8pipe.pipeline.channel import Channels
from chainer_fp8pipe.mpi.ranks import nodes_of
import numpy
from mpi4py import MPI

comm, done = MPI.COMM_WORLD, pathlib.Path(sys.argv[1])
if nodes_of(comm) != [0, 1]:
    sys.exit('this MPI does not take one node for two')
channels = Channels(comm, 0)
arrays = numpy.arange(2 ** 20), numpy.ones((3, 5))


if comm.rank == 0:
    channels.send(arrays, 1)         # so that the next has no description
    channels.flush()
    comm.Barrier()
    end = time.monotonic() + 200
    with channels.moving():
        channels.send(arrays, 1)
        while not done.exists() and time.monotonic() < end:
            numpy.ones(10 ** 5).sum()
    print('in time' if done.exists() else 'too late')
    channels.flush()
else:
    channels.receive(0)
    comm.Barrier()
    for one, other in zip(channels.receive(0), arrays):
        numpy.testing.assert_array_equal(one, other)
    done.touch()
'''


def test_a_large_message_leaves_while_its_sender_computes(
        tmp_path, monkeypatch):
    # MPICH takes each rank for a node of its own, and talks over TCP.
    monkeypatch.setenv('MPIR_CVAR_NOLOCAL', '1')
    monkeypatch.setenv('UCX_TLS', 'tcp,self')
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    result = run_script(2, script, tmp_path / 'done')
    if 'does not take one node for two' in result.stderr:
        pytest.skip('needs MPICH, which can take one node for two '
                    '(MPIR_CVAR_NOLOCAL)')
    assert result.returncode == 0, result.stderr
    assert result.stdout.split('\n')[0] == 'in time'
