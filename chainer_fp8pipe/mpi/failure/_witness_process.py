"""The script of the witness, which sees the first rank of a node that ends.

:mod:`.witness` says what the witness is for.  The script imports the standard
library only, to start quickly and stay small.

A launcher that loses a rank kills the others, and one that is told to end the
job kills them all; both come as signals to the ranks' process groups.  So two
processes come of this script.  The *sentinel* stays in the group of the rank
that started it, and does nothing.  The *witness*, its child, moves to a
session of its own, where no such signal reaches it.  If the sentinel ends
first, it was the launcher that began, and the witness has nothing to say.
Where all are ended by SIGTERM a rank may be gone before the sentinel; but that
ends by it, too, while launchers that have lost a rank use SIGKILL.

The witness may get a core late, as the kernel keeps events in their order.  A
dying process closes its files, on which the launcher acts, before it counts
as ended.  So the end of a rank shows as its closed line to the witness; or,
where a fork of the rank holds the line, too, as the end of the process.
"""
import array
import contextlib
import datetime
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import time

GOODBYE = b'goodbye'        # this rank's end is in order
ALL_END = b'all end'        # the whole job is ended, by a rank that says why

_DYING = 1.0                # seconds from the end of the line to that of all
_PATIENCE = 0.1             # seconds to wait for how a process ended
_LONGEST_STACK = 8000       # characters
_PIDFD_GET_INFO = 0xC040FF0B        # <linux/pidfd.h>
_PIDFD_INFO_EXIT = 1 << 3
_INFO = struct.Struct('=Q52xi')     # the mask, and the wait status at 60
_OWN = struct.Struct('=iII')        # struct ucred: process, user, group


def main(token: str, listener: int, starter: int, size: int, questions: int
         ) -> None:
    """Divides into sentinel and witness; returns in neither.

    ``listener`` is the file of the socket that ranks connect to, ``starter``
    the process of the rank that started this one, ``size`` that of the job,
    ``questions`` the file of the socket that other hosts ask, with ``token``.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)   # ranks may live on
    theirs, ours = os.pipe()
    sentinel = os.getpid()
    if os.fork():
        os.close(ours)
        os.read(theirs, 1)          # until the witness ends
    else:
        os.close(theirs)
        os.setsid()
        with contextlib.suppress(OSError):      # such as: not permitted here
            witness = _Witness(socket.socket(fileno=listener), ours,
                               _Process(sentinel),
                               _Questions(questions, token.encode()))
            if ended := witness.wait(starter):
                os.write(2, ended.epitaph(len(witness.ranks) == size).encode())
    os._exit(0)


class _Process:
    """A process, and how it ends."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        #: Becomes readable when the process ends; None if it has.
        self.pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self.pidfd = os.pidfd_open(pid)

    def is_gone(self) -> bool:
        """Whether it has ended, or ends within a second."""
        return self.pidfd is None or bool(
            select.select([self.pidfd], [], [], _DYING)[0])

    def in_words(self) -> str:
        """Describes how it has ended."""
        status = self._status()
        if status is None:
            return 'was killed or crashed'
        if not os.WIFSIGNALED(status):
            return (f'ended with exit code {os.WEXITSTATUS(status)}, without '
                    'an exception or MPI_Finalize,')
        number = os.WTERMSIG(status)
        name = f'signal {number}'
        with contextlib.suppress(ValueError):       # it has no name
            name = signal.Signals(number).name
        return f'was killed by {name}' + (
            ' (the system does that when memory is short)'
            if name in ('SIGKILL', 'SIGBUS') else '')

    def state(self) -> str:
        """One letter, as in /proc: T is stopped; '' if it is gone."""
        with contextlib.suppress(OSError, IndexError), open(
                f'/proc/{self.pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0]
        return ''

    def _status(self) -> int | None:
        """Wait status, as ``os.wait`` returns it; None if not available."""
        end = time.monotonic() + _PATIENCE
        while True:
            status = self._before_wait() or self._after_wait()
            if status is not None or time.monotonic() > end:
                return status
            time.sleep(1e-3)

    def _before_wait(self) -> int | None:
        """The status of a zombie; None for 0, which may be a refusal."""
        with contextlib.suppress(OSError), open(
                f'/proc/{self.pid}/stat') as file:
            fields = file.read().rpartition(')')[2].split()
            if fields[0] == 'Z':
                return int(fields[-1]) or None
        return None

    def _after_wait(self) -> int | None:
        """The status after the parent has waited; from Linux 6.15 on."""
        if self.pidfd is None:
            return None
        info = array.array('B', _INFO.pack(_PIDFD_INFO_EXIT, 0))
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.pidfd, _PIDFD_GET_INFO, info)
            mask, status = _INFO.unpack(info)
            if mask & _PIDFD_INFO_EXIT:
                return status
        return None


class _Rank(_Process):
    """A rank's process."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.line: socket.socket | None = None      # to the witness
        self.closed = False         # the line
        self.name = ''              # that the rank sent
        self.said_goodbye = False   # so that it may end
        self.stack = 0, 0           # signal that has it written, and to where
        self.how = ''               # the rank has ended, in words

    def ends(self, ready: int) -> bool:
        """Whether it has ended, or is ending, after an event on a file."""
        if self.pidfd in (None, ready):
            return True
        if not (self.line and self.line.fileno() == ready and self.closed):
            return False
        # Not if it has become another program (os.execv).
        return self.is_gone()

    def write_stack(self) -> None:
        """Has the rank write its stack, which it can do though it waits."""
        number, _ = self.stack
        if number and self.pidfd is not None and self.state() in 'RSD':
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pidfd, number)

    def written_stack(self) -> str:
        """What the rank has written last."""
        with contextlib.suppress(OSError), open(
                f'/proc/{self.pid}/fd/{self.stack[1]}') as file:
            return file.read()[-_LONGEST_STACK:] if self.stack[0] else ''
        return ''

    def epitaph(self, all_are_here: bool) -> str:
        """The line about its end."""
        at = datetime.datetime.now().time().isoformat('microseconds')
        others = '' if all_are_here else (
            '; if there are several such lines, the earliest is the cause')
        return (f'\nchainer_fp8pipe: {self.name}, process {self.pid} on host '
                f'{os.uname().nodename}, {self.how} in the middle of the '
                f'job ({at}{others})\n')


class _Questions:
    """Tells those who ask in what state the ranks' processes are.

    They ask when a job stands still: a rank that is stopped cannot answer
    itself.  ``file`` is a UDP socket; a question begins with ``token``.
    """

    def __init__(self, file: int, token: bytes) -> None:
        self._socket = socket.socket(fileno=file)
        self._socket.setblocking(False)
        self._token = token

    def fileno(self) -> int:
        """For ``epoll``."""
        return self._socket.fileno()

    def answer(self, ranks: list[_Rank]) -> None:
        """Answers all questions that have come."""
        import json  # only a witness that is asked needs it

        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data, place = self._socket.recvfrom(1 << 12)
                    if not data.startswith(self._token):
                        continue
                    asked = json.loads(data[len(self._token):])
                    wanted = [rank for rank in ranks
                              if rank.pid in asked['stacks']]
                    self._socket.sendto(
                        (asked['token'] + json.dumps({
                            'from': asked['from'], 'kind': 'processes',
                            'found': [(rank.name, rank.state(),
                                       rank.written_stack()
                                       if rank in wanted else '')
                                      for rank in ranks]})).encode(), place)
                    for rank in wanted:     # for the next question
                        rank.write_stack()
                except BlockingIOError:
                    raise
                except (OSError, ValueError, KeyError, TypeError):
                    continue    # who asked is gone, or asked nonsense


class _Witness:
    """Waits for the first end.

    Ranks connect to ``listener``; the sentinel reads ``pipe``; others may ask
    ``questions``.
    """

    def __init__(self, listener: socket.socket, pipe: int,
                 sentinel: _Process, questions: _Questions | None = None
                 ) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self.ranks: dict[int, _Rank] = {}       # known so far, by process
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        self._sentinel = sentinel
        self._pipe = pipe
        self._epoll.register(pipe, 0)       # tells when nobody reads it
        self._questions = questions
        if questions:
            self._epoll.register(questions, select.EPOLLIN)

    def wait(self, starter: int) -> _Rank | None:
        """The rank that ended first; None if that was in order."""
        # The witness must not outlive its starter, connected or not.
        while self._add(starter).pidfd is not None:
            # In the order in which it happened, unlike poll.
            for ready, _ in self._epoll.poll():
                if ready == self._pipe:
                    return None
                if self._questions and ready == self._questions.fileno():
                    self._questions.answer([*self.ranks.values()])
                    continue
                # A goodbye that was sent before an end counts.
                self._meet()
                if self._hear():
                    return None
                for rank in self.ranks.values():
                    if rank.ends(ready):
                        return rank if self._is_cause(rank) else None
        return None

    def _is_cause(self, rank: _Rank) -> bool:
        """Whether the end of this rank, the first, was that of the job."""
        if rank.said_goodbye or not rank.name:
            return False
        rank.how = rank.in_words()      # which the kernel may soon forget
        return not (rank.how.endswith('SIGTERM') and self._sentinel.is_gone()
                    and self._sentinel.in_words().endswith('SIGTERM'))

    def _add(self, pid: int) -> _Rank:
        """The rank of a process; watches the process from now on."""
        rank = self.ranks.get(pid)
        if rank is None:
            rank = self.ranks[pid] = _Rank(pid)
            if rank.pidfd is not None:
                self._epoll.register(rank.pidfd, select.EPOLLIN)
        return rank

    def _meet(self) -> None:
        """Accepts new connections."""
        with contextlib.suppress(BlockingIOError):
            while True:
                line, _ = self._listener.accept()
                pid, user, _ = _OWN.unpack(line.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, _OWN.size))
                # 0: of another PID namespace, so that it cannot be watched.
                if pid and user == os.geteuid():
                    line.setblocking(False)
                    self._epoll.register(line, select.EPOLLIN)
                    self._add(pid).line = line

    def _hear(self) -> bool:
        """Reads all messages; True if one of them ends the job."""
        for rank in self.ranks.values():
            with contextlib.suppress(BlockingIOError):
                while rank.line and not rank.closed:
                    try:
                        message = rank.line.recv(1024)
                    except ConnectionResetError:
                        message = b''
                    if message == ALL_END:
                        return True
                    if message == GOODBYE:
                        rank.said_goodbye = True
                    elif message.startswith(b'stack '):
                        _, *numbers = message.split()
                        rank.stack = int(numbers[0]), int(numbers[1])
                    elif message:
                        rank.name = message.decode(errors='replace')
                    else:
                        rank.closed = True
        return False


if __name__ == '__main__':
    main(sys.argv[1], *map(int, sys.argv[2:]))
