"""MPI libraries that do something else than MPI's."""
import contextlib
import ctypes

from chainer_fp8pipe.allreduce import engine, memory
from chainer_fp8pipe.mpi import ranks

import pytest

_TRANSMIT = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p,
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_TESTSOME = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(
        ctypes.c_int), ctypes.POINTER(ctypes.c_int), ctypes.c_void_p)


# Engines call them as long as they live.
_kept = []


@contextlib.contextmanager
def unbuffered():
    """No send of an engine ends before its receive is there."""
    # Not the fixture, which would patch another process.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, 'SEND', 'MPI_Issend')
        patch.setattr(memory, '_machine', str)      # all are elsewhere
        yield


@contextlib.contextmanager
def recorded(events):
    """Appends ``('send' or 'receive', bytes)`` when a message is started."""
    send, receive, testsome = ranks.library().functions

    def recording(kind, address):
        original = _TRANSMIT(address)

        @_TRANSMIT
        def transmit(data, count, *rest):
            events.append((kind, count))
            return original(data, count, *rest)
        return transmit
    with _instead(recording('send', send), recording('receive', receive),
                  _TESTSOME(testsome)):
        yield


@contextlib.contextmanager
def refused():
    """Of engines that are made inside, MPI starts no message."""
    @_TRANSMIT
    def transmit(*arguments):
        return 1        # an error, MPI_ERR_BUFFER
    testsome = _TESTSOME(ranks.library().functions[2])
    with _instead(transmit, transmit, testsome, elsewhere=False):
        yield


class Silence:
    """A library whose messages are through when :attr:`through` says so.

    Attributes:
        started: ``(kind, rank, tag)`` of all messages.
        through: Asked with these; no message carries any data.
        error: What functions return.
    """

    def __init__(self, through):
        self.started = []
        self.through = through
        self.error = 0
        self._messages = {}

    @contextlib.contextmanager
    def used(self):
        """By engines that are made inside."""
        with _instead(self._transmit('send'), self._transmit('receive'),
                      _TESTSOME(self._testsome)):
            yield

    def _transmit(self, kind):
        @_TRANSMIT
        def transmit(data, count, datatype, rank, tag, comm, request):
            self._messages[len(self.started) + 1] = kind, rank, tag
            self.started.append((kind, rank, tag))
            ctypes.c_int.from_address(request).value = len(self.started)
            return self.error
        return transmit

    def _testsome(self, count, requests, found, indices, statuses):
        requests = (ctypes.c_int * count).from_address(requests)
        some = [index for index in range(count)
                if self.through(*self._messages[requests[index]])]
        for place, index in enumerate(some):
            indices[place] = index
        found[0] = len(some)
        return self.error


@contextlib.contextmanager
def _instead(*replacements, elsewhere=True):
    _kept.append(replacements)
    library = ranks.library()._replace(functions=tuple(
        ctypes.cast(function, ctypes.c_void_p).value
        for function in replacements))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, 'library', lambda: library)
        if elsewhere:       # all ranks
            patch.setattr(memory, '_machine', str)
        yield
