"""What compiled code knows of MPI."""
import ctypes

from chainer_fp8pipe.mpi.functions import exception

import pytest
from mpi4py import MPI


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
