"""What is kept forever outlives the interpreter."""
import subprocess
import sys
import weakref

from chainer_fp8pipe.mpi.forever import HeldRequest

import numpy
import pytest
from mpi4py import MPI

from tests.ranks import on_ranks

SCRIPT = '''
import sys
from chainer_fp8pipe.mpi.forever import keep_forever

class Memory:
    def __del__(self, write=sys.stdout.write, flush=sys.stdout.flush):
        write('freed')
        flush()

class Owner:
    def __init__(self):
        self.memory = [Memory()]
        self.owner = self

owner = Owner()
if sys.argv[1] == 'kept':
    keep_forever(owner)
'''


@pytest.mark.parametrize(('how', 'printed'), [('kept', ''),
                                              ('not', 'freed')])
def test_a_kept_object_is_never_freed(how, printed):
    done = subprocess.run([sys.executable, '-c', SCRIPT, how], text=True,
                          capture_output=True, check=True)
    assert done.stdout == printed


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
