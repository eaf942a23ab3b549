"""Runs the body of a test on several MPI ranks, from plain ``pytest``.

    @on_ranks(1, 2, 4)
    def test_sum(comm):
        assert comm.allreduce(1) == comm.size

The body runs in every rank of an ``mpiexec`` job; an exception on any rank
fails the test and shows that rank's traceback.  Jobs are kept for the next
test with as many ranks, as starting one takes seconds; after a failure the
job is ended, and the next test starts another.  All jobs end with pytest,
whatever ends it.
"""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib
import inspect
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Client, Connection, Listener, wait

import pytest

_KEY = b'tests of chainer_fp8pipe'
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_START_SECONDS = 300
_LIBC = ctypes.CDLL(None) if sys.platform == 'linux' else None
_PR_SET_PDEATHSIG = 1       # <linux/prctl.h>
_jobs: dict[int, Job] = {}


def mpiexec(ranks: int) -> list[str]:
    """The command that starts so many ranks: ``$MPIEXEC``, or mpiexec."""
    beside = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
    found = (beside if os.path.exists(beside) else shutil.which('mpiexec'))
    # Only what somebody has named has options; a path may have spaces.
    command = shlex.split(os.environ.get('MPIEXEC', '')) or (
        [found] if found else [])
    if not command:
        pytest.skip('no mpiexec beside the interpreter, on the path or in '
                    'MPIEXEC')
    return [*command, '-n', str(ranks)]


def environment() -> dict[str, str]:
    """One BLAS thread per rank, this tree's package and tests, short waits.

    Tests have more ranks than most machines have cores.  A rank of MPICH's
    that waits asks for messages without a pause, and takes the core from the
    rank that it waits for: with HEAVY_YIELD it sleeps for some microseconds
    in between.  Other MPIs do not read that variable.
    """
    path = os.pathsep.join(
        filter(None, [_ROOT, os.environ.get('PYTHONPATH')]))
    return {'MPIR_CVAR_ENABLE_HEAVY_YIELD': '1',
            # Jobs wait for the next test as long as it takes.
            'CHAINER_FP8PIPE_STALL': '0', **os.environ,
            'PYTHONPATH': path, 'OMP_NUM_THREADS': '1',
            'OPENBLAS_NUM_THREADS': '1', 'PYTHONUNBUFFERED': '1'}


def end_with_parent() -> None:
    """For ``Popen(preexec_fn=...)``: a launcher does not outlive pytest.

    Where pytest is killed, nothing of Python's runs any more, and ranks in
    the middle of a test would wait for each other for ever.  Linux then
    sends the launcher SIGTERM, which ends its ranks; other systems do not.
    """
    if _LIBC:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run_script(ranks: int, *arguments: str, timeout: float = 300,
               **options) -> subprocess.CompletedProcess:
    """``mpiexec -n ranks python *arguments``; 0: without mpiexec."""
    return _start(subprocess.run, ranks, arguments, timeout=timeout,
                  **options)


def start_script(ranks: int, *arguments: str, **options) -> subprocess.Popen:
    """As :func:`run_script`, but it is not waited for."""
    return _start(subprocess.Popen, ranks, arguments, **options)


def _start(how, ranks, arguments, **options):
    return how([*(mpiexec(ranks) if ranks else ()), sys.executable,
                *map(str, arguments)], **{
        'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True,
        'env': environment(), 'preexec_fn': end_with_parent, **options})


def on_ranks(*sizes: int, timeout: float = 300):
    """Decorator: runs the test once per size, on so many ranks.

    The body's first parameter is mpi4py's communicator of these ranks; it
    may have others (parametrised values and fixtures that can be pickled).
    """
    def decorate(body):
        @functools.wraps(body)
        def test(ranks, **arguments):
            try:
                _job(ranks).call(body, arguments, timeout)
            except pytest.skip.Exception:
                raise
            except BaseException:
                _end(ranks)
                raise
        signature = inspect.signature(body)
        parameters = [inspect.Parameter(
            'ranks', inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        parameters += list(signature.parameters.values())[1:]
        test.__signature__ = signature.replace(parameters=parameters)
        return pytest.mark.parametrize('ranks', sizes)(test)
    return decorate


class Job:
    """An mpiexec job whose ranks wait for something to call."""

    def __init__(self, size: int) -> None:
        # The path of a socket has 107 bytes at most, whatever TMPDIR has.
        folder = tempfile.mkdtemp(prefix='ranks-', dir=None if len(
            os.fsencode(tempfile.gettempdir())) < 80 else '/tmp')
        address = os.path.join(folder, 'socket')
        self._output = os.path.join(folder, 'output')
        self._folder = folder
        self._pids: dict[int, int] = {}
        with open(self._output, 'w') as output, Listener(
                address, 'AF_UNIX', backlog=size, authkey=_KEY) as listener:
            self._process = subprocess.Popen(
                [*mpiexec(size), sys.executable, '-m', 'tests.ranks',
                 address], env=environment(), cwd=_ROOT,
                stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=end_with_parent)
            self._ranks = self._accept(listener, size)

    def call(self, body, arguments, timeout: float) -> None:
        """Calls ``body(comm, **arguments)`` on every rank.

        Fails with the traceback of the ranks that failed; skips if all ranks
        skip for the same reason.
        """
        for connection in self._ranks.values():
            connection.send((body.__module__, body.__qualname__, arguments))
        failures, skips = {}, set()
        missing = {connection: rank for rank, connection
                   in self._ranks.items()}
        end = time.monotonic() + timeout
        while missing and time.monotonic() < end:
            for connection in wait([*missing], max(end - time.monotonic(), 0)):
                rank = missing.pop(connection)
                outcome, reason = _receive(connection)
                skips.add(reason)
                if outcome:
                    failures[rank] = outcome
                    # The others may wait for this rank for ever.
                    end = min(end, time.monotonic() + 2)
        if failures or missing:
            pytest.fail(self._explain(failures, [*missing.values()]),
                        pytrace=False)
        if len(skips) > 1:
            pytest.fail(f'ranks skip for different reasons, or some do not: '
                        f'{skips}', pytrace=False)
        if reason := skips.pop():
            pytest.skip(reason)

    def end(self) -> None:
        """Ends the job, whatever its ranks are doing."""
        for connection in self._ranks.values():
            connection.close()
        for number in 0, signal.SIGTERM, signal.SIGKILL:    # 0 is none
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
                break
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self, listener: Listener, size: int) -> dict[int, Connection]:
        # Listener has no time-out of its own.
        listener._listener._socket.settimeout(_START_SECONDS)
        connections = {}
        try:
            while len(connections) < size:
                connection = listener.accept()
                rank, pid = connection.recv()
                connections[rank], self._pids[rank] = connection, pid
        except Exception as error:
            self._process.kill()
            raise RuntimeError(
                f'mpiexec did not start {size} ranks: {error}\n'
                + self._printed()) from error
        return dict(sorted(connections.items()))

    def _explain(self, failures: dict[int, str], missing: list[int]) -> str:
        text = [f'--- rank {rank} of {len(self._ranks)} ---\n{trace}'
                for rank, trace in sorted(failures.items())]
        if missing:
            text.append('no answer from rank '
                        + ', '.join(map(str, missing))
                        + '; where each was is at the end of the output')
            for rank in missing:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[rank], signal.SIGUSR1)
            time.sleep(0.5)
        return '\n'.join([*text, self._printed()])

    def _printed(self) -> str:
        with open(self._output) as output:
            return f'--- output of the job ---\n{output.read()[-4000:]}'


def _job(size: int) -> Job:
    if size not in _jobs:
        _jobs[size] = Job(size)
    return _jobs[size]


def _end(size: int) -> None:
    job = _jobs.pop(size, None)
    if job:
        job.end()


@atexit.register
def _end_all() -> None:
    for size in list(_jobs):
        _end(size)


def _receive(connection: Connection) -> tuple[str, str | None]:
    """A traceback, '' if there is none, and why the rank skips, if it does."""
    try:
        return connection.recv()
    except EOFError:
        return 'the process died', None


def _serve(address: str) -> None:
    """What a rank does: waits, without using the processor, for calls."""
    from chainer_fp8pipe.mpi.ranks import free_with_kept

    import chainer
    from mpi4py import MPI
    faulthandler.register(signal.SIGUSR1)
    rank = MPI.COMM_WORLD.rank
    connection = Client(address, 'AF_UNIX', authkey=_KEY)
    connection.send((rank, os.getpid()))
    config = dict(vars(chainer.global_config))
    while True:
        try:
            module, name, arguments = connection.recv()
        except EOFError:
            return
        try:
            test = getattr(importlib.import_module(module), name)
            # Messages that a test leaves behind must not meet the next.
            comm = MPI.COMM_WORLD.Dup()
            test.__wrapped__(comm, **arguments)
            free_with_kept(comm)
        except pytest.skip.Exception as skip:
            answer = '', str(skip)
        except BaseException:
            answer = traceback.format_exc(), None
        else:
            answer = '', None
        if not answer[0]:
            vars(chainer.global_config).clear()
            vars(chainer.global_config).update(config)
        connection.send(answer)


if __name__ == '__main__':
    _serve(sys.argv[1])
