"""What compiled code knows of MPI."""
import ctypes

from chainer_fp8pipe.mpi.functions import exception, handle, library

import pytest
from mpi4py import MPI

from tests.ranks import on_ranks


@on_ranks(2)
def test_a_message_goes_by_addresses_and_handles_alone(comm):
    mpi = library()
    parameters = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int,
                  ctypes.c_void_p, ctypes.c_int, ctypes.c_int,
                  ctypes.c_void_p, ctypes.c_void_p)
    function = ctypes.CFUNCTYPE(*parameters)(mpi.functions[comm.rank])
    data = ctypes.create_string_buffer(b'hello' if comm.rank == 0 else 5)
    request = MPI.Request()
    assert function(ctypes.addressof(data), 5, mpi.byte % 2 ** 64,
                    1 - comm.rank, 7, handle(comm) % 2 ** 64,
                    MPI._addressof(request)) == MPI.SUCCESS
    request.Wait()
    assert data.raw[:5] == b'hello'


def status(error):
    made = MPI.Status()
    made.error = error
    return ctypes.string_at(MPI._addressof(made), MPI._sizeof(made))


@pytest.mark.parametrize('errors', [
    [MPI.ERR_TRUNCATE], [MPI.SUCCESS, MPI.ERR_TRUNCATE],
    [MPI.ERR_PENDING, MPI.ERR_TRUNCATE, MPI.ERR_OTHER]])
def test_the_error_of_a_message_is_found_in_its_status(errors):
    found = exception(MPI.ERR_IN_STATUS, b''.join(map(status, errors)))
    assert found.Get_error_class() == MPI.ERR_TRUNCATE


def test_other_errors_are_what_they_are():
    assert exception(MPI.ERR_RANK, b'').Get_error_class() == MPI.ERR_RANK
    assert exception(MPI.ERR_IN_STATUS, b'').Get_error_class() == (
        MPI.ERR_IN_STATUS)
