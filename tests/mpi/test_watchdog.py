"""What the watchdog says: who has died first, why a job stands still."""
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from chainer_fp8pipe.mpi.watchdog.process import WatchdogJob
from chainer_fp8pipe.mpi.watchdog.stall import (
    _OURS,
    ACTION,
    GONE,
    LEFT,
    SECONDS,
    SILENT,
    STOPPED,
    WAITS,
    WORKS,
    Frame,
    RankView,
    StallRule,
    StallSettings,
    described,
    find_cause,
    settings_of_environment,
)

import pytest

from tests.ranks import end_with_parent


def view(rank, state, updates=5, **more):
    call = 'agree' if state == WAITS else ''
    return RankView(rank, f'rank {rank} of 2', state, updates=updates,
                    **{'call': call, 'usual': 0.1, **more})


def decisions(phases, settings=None, is_complete=True):
    """When something is decided, and whether the job ends then.

    Each phase is its seconds and the ranks' views, or what makes the views
    of a second.
    """
    rule, now, found = StallRule(settings or StallSettings(), 8.0), 0.0, []
    for seconds, views in phases:
        for _ in range(seconds):
            now += 1.0
            made = views(now) if callable(views) else views
            decision = rule.look(now, made, is_complete)
            if decision:
                found.append((now, decision[0]))
    return found


TRAIN = 1, [view(0, WORKS), view(1, WORKS)]
OUTSIDE = view(0, WAITS, outside=True)


def moving(now):
    return [view(0, WAITS, moves=str(now)), view(1, WAITS)]


@pytest.mark.parametrize(('phases', 'expected'), [
    # A rank cannot go on, and another waits for it.
    ([(100, [view(0, WAITS), view(1, STOPPED)])], [(32, True)]),
    ([(100, [view(0, WAITS), view(1, GONE)])], [(32, True)]),
    ([(100, [view(0, WAITS, waits_for=(1,)), view(1, LEFT)])], [(32, True)]),
    # It may not be that one that is waited for.
    ([(200, [view(0, WAITS), view(1, LEFT)])], [(122, True)]),
    # All wait for each other; one long message looks alike.
    ([(200, [view(0, WAITS), view(1, WAITS, call='bcast')])], [(122, True)]),
    ([(200, [view(0, WAITS), view(1, WAITS)])], [(122, True)]),
    # A rank evaluates, reads, compiles, sleeps, waits for a process.
    ([(2000, [view(0, WORKS), view(1, WAITS)])], [(302, False)]),
    # A debugger holds a rank, or a library its interpreter.
    ([(2000, [view(0, SILENT), view(1, WAITS)])], [(302, False)]),
    # All, or one that others wait for, wait for a spawned process.
    ([(2000, [OUTSIDE, view(1, WAITS, outside=True)])], [(302, False)]),
    ([(2000, [OUTSIDE, view(1, WAITS, waits_for=(0,))])], [(302, False)]),
    ([(2000, [OUTSIDE, view(1, LEFT)])], [(302, False)]),
    # Nobody waits: ranks have ended, evaluate, or are all stopped.
    ([(2000, [view(0, WORKS), view(1, LEFT)])], []),
    ([(2000, [view(0, WORKS), view(1, WORKS)])], []),
    ([(2000, [view(0, STOPPED), view(1, STOPPED)])], []),
    ([(2000, [view(0, WORKS), view(1, STOPPED)])], []),
    # All were stopped, and go on one after the other.
    ([(2000, [view(0, STOPPED), view(1, STOPPED)]),
      (20, [view(0, WAITS), view(1, STOPPED)]), (1, TRAIN[1])], []),
    # One was stopped, and goes on.
    ([(29, [view(0, WAITS), view(1, STOPPED)]),
      (200, [view(0, WAITS), view(1, WORKS)])], []),
    # After a long evaluation all take part in a long message.
    ([(290, [view(0, WORKS), view(1, WAITS)]),
      (100, [view(0, WAITS), view(1, WAITS)])], []),
    # Frames arrive, or a loop makes one wait after the other.
    ([(2000, moving)], []),
    # Updates go on, one in a minute.
    ([(2000, lambda now: [view(0, WAITS, 5 + now // 60),
                          view(1, WAITS, 5 + now // 60)])], []),
    # Before the first update a start may take its time.
    ([(2000, [view(0, WAITS, 0), view(1, STOPPED, 0)])], []),
    # An aggregator waits for orders.
    ([(2000, [view(0, WORKS), view(1, WAITS, 0)])], []),
    # What has been said of a stall is said again only of the next one.
    ([(400, [view(0, WORKS), view(1, WAITS)]),
      (400, [view(0, WORKS, 6), view(1, WAITS, 6)])],
     [(302, False), (702, False)]),
])
def test_a_job_stands_still_while_somebody_waits_and_nothing_changes(
        phases, expected):
    assert decisions([TRAIN, *phases]) == expected


def test_the_limit_is_that_of_slow_updates():
    views = [view(0, WAITS), view(1, STOPPED, usual=5.0)]
    assert decisions([TRAIN, (200, views)]) == [(102, True)]


def test_ranks_that_nobody_knows_may_be_waited_for():
    assert decisions([TRAIN, (2000, [view(0, WAITS), view(1, WAITS)])],
                     is_complete=False) == [(302, False)]


@pytest.mark.parametrize('busy', [WORKS, WAITS, STOPPED])
@pytest.mark.parametrize('ends', [True, False])
def test_seconds_that_were_given_hold_for_all(busy, ends):
    assert decisions([TRAIN, (200, [view(0, WAITS), view(1, busy)])],
                     StallSettings(5.0, ends)) == [(7, ends)]


def test_time_in_which_the_watchdog_did_not_run_does_not_count():
    rule = StallRule(StallSettings(5.0), 8.0)
    views = [view(0, WAITS), view(1, STOPPED)]
    times = [1.0, 2.0, 3600.0, 3601.0, 3602.0, 3604.0, 3606.0]
    assert [bool(rule.look(now, views, True)) for now in times] == [
        False] * 6 + [True]


def test_what_is_silent_keeps_the_count_of_its_updates():
    """Or it would be taken for a rank that makes none."""
    rule = StallRule(StallSettings(5.0), 8.0)
    decided = (rule.look(now, [view(0, WAITS), view(
        1, WAITS, -1 if now else 3, call='bcast')], True)
        for now in range(20))
    _, text = next(filter(None, decided))
    assert 'rank 1 of 2 has finished no update for 5 seconds (at least 3 ' in (
        text)
    assert text.endswith('ending all ranks with exit code 75\n')


@pytest.mark.parametrize(('views', 'ranks', 'is_certain', 'said'), [
    *(([view(0, WAITS), view(1, state), view(2, WAITS, waits_for=(1,))], [1],
       True, f'rank 1 of 2 {state}') for state in (STOPPED, GONE, LEFT)),
    ([view(0, WORKS), view(1, STOPPED)], [1], True, ''),
    # One that works on after others have left.
    ([view(0, WORKS), view(1, LEFT)], [0], False, ''),
    # Of those that work, one for which another waits.
    ([view(0, WORKS), view(1, WORKS), view(2, WAITS, waits_for=(1,))], [1],
     False, ''),
    # The last of those that wait behind each other.
    ([view(0, WAITS, waits_for=(1,)), view(1, WAITS, waits_for=(2,)),
      view(2, WAITS, call='MPI: bcast')], [2], True, ''),
    # Another call than most, or another update.
    *(([view(0, WAITS), view(1, WAITS), other, view(3, WAITS)], [2], True,
       'the others:\n  rank 0 of 2')
      for other in (view(2, WAITS, call='MPI: allreduce'),
                    view(2, WAITS, 6))),
    ([view(0, WAITS), view(1, WAITS, call='MPI: bcast')], [0, 1], True,
     'different calls'),
    ([view(0, WAITS), view(1, WAITS)], [], True, 'in the same place'),
    ([view(rank, STOPPED) for rank in range(40)], [*range(40)], True,
     'and 24 more'),
])
def test_the_cause_is_who_others_wait_for(views, ranks, is_certain, said):
    found, text, certain = find_cause(views)
    assert (found, certain) == (ranks, is_certain)
    assert said in text
    assert text.count('\n') <= 18


# --- settings ----------------------------------------------------------------

@pytest.mark.parametrize(('given', 'settings'), [
    ({}, StallSettings()),
    ({SECONDS: ''}, StallSettings()),
    ({SECONDS: '0'}, StallSettings(0.0)),
    ({SECONDS: ' 2.5 ', ACTION: 'warn'}, StallSettings(2.5, ends=False)),
    ({ACTION: 'end'}, StallSettings()),
])
def test_settings_are_those_of_the_environment(monkeypatch, given, settings):
    monkeypatch.delenv(SECONDS, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert settings_of_environment() == settings


@pytest.mark.parametrize(('name', 'value'), [
    (SECONDS, 'soon'), (SECONDS, '-1'), (SECONDS, 'nan'), (SECONDS, 'inf'),
    (ACTION, 'restart')])
def test_a_value_that_is_not_allowed_is_an_error_that_names_it(
        monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f'{name} must be .*{value}'):
        settings_of_environment()


# --- where a rank is

@pytest.mark.parametrize(('frame', 'call'), [
    (Frame('script.py', 1, 'main', 'Barrier'), 'MPI: Barrier'),
    (Frame('script.py', 1, 'main', 'recv'), ''),
    (Frame('/x/chainermn/base.py', 1, 'f', 'recv'), 'MPI: recv'),
    (Frame(f'{_OURS}mpi/grid.py', 1, 'gather', 'gather'),
     'MPI: gather'),
    (Frame(f'{_OURS}allreduce/engine.py', 1, 'finish'),
     'engine.py:finish'),
])
def test_what_is_a_wait(frame, call):
    said = described([frame])
    assert said['call'] == call
    assert said['state'] == (WAITS if call else WORKS)
    assert described([])['where'] == 'at the end of its main thread'


# --- a watchdog and its ranks, which are processes of this test

#: A rank sends to the watchdog, or does, what standard input says.
RANK = """
import json, os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)    # ignored in the background
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect(b'\\0' + sys.argv[1].encode())
for text in sys.stdin:
    print(flush=True)
    if text.startswith('{'):
        line.send(text.encode())
    else:
        exec(text)
"""
_SILENT = StallSettings(0.0)


class Node:
    """A watchdog that can be stopped, and ranks that can be killed."""

    def __init__(self, stack, ranks):
        self._stack = stack
        lines = stack.enter_context(socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET))
        lines.bind('')
        lines.listen()
        name = lines.getsockname()[1:].decode()
        self.ranks = [self._process(
            '-c', RANK, name, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(ranks)]
        job = WatchdogJob(0, self.ranks[0].pid, ranks, _SILENT,
                          lines.fileno(), -1, '')
        self.watchdog = self._process(
            *job.command()[1:], pass_fds=[lines.fileno()],
            stderr=subprocess.PIPE)
        for rank in range(ranks):
            self.say(rank, rank=rank, who=f'rank {rank}', dump=None)
        self._wait_until_all_are_watched()

    def _process(self, *command, **options):
        found = self._stack.enter_context(subprocess.Popen(
            [sys.executable, *command], preexec_fn=end_with_parent, text=True,
            **options))
        self._stack.callback(found.kill)
        return found

    def _wait_until_all_are_watched(self):
        folder = pathlib.Path(f'/proc/{self.watchdog.pid}/fdinfo')
        watched = 0
        while watched < len(self.ranks):
            with contextlib.suppress(OSError):  # a file that it has closed
                watched = sum('Pid:' in file.read_text()
                              for file in folder.iterdir())
            time.sleep(0.01)

    def do(self, rank, text):
        process = self.ranks[rank]
        process.stdin.write(text + '\n')
        process.stdin.flush()
        process.stdout.readline()

    def say(self, number, **message):
        self.do(number, json.dumps(message))

    def ended(self, rank, how):
        """Lets it end; it is not waited for, as launchers may not do."""
        self.do(rank, how)
        os.waitid(os.P_PID, self.ranks[rank].pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def node():
    if not hasattr(os, 'pidfd_open'):
        pytest.skip('no watchdog without os.pidfd_open (Linux 5.3)')
    with contextlib.ExitStack() as stack:
        yield Node(stack, 3)


DIES = 'os.kill(os.getpid(), {})'


# What ranks 0 to 2 do, one after the other, and what is said of it.
@pytest.mark.parametrize(('ends', 'said'), [
    ({1: DIES.format(9)}, 'rank 1 was killed by SIGKILL (the system does '
     'that when memory is short) in the middle of the job'),
    ({0: DIES.format(11)}, 'rank 0 was killed by SIGSEGV in the middle'),
    ({2: DIES.format(40)}, 'rank 2 was killed by signal 40 in'),
    ({2: 'os._exit(7)'}, 'rank 2 ended with exit code 7, without an '
     'exception or MPI_Finalize, in the middle of the job'),
    # The launcher kills the others, after a signal to one; to all: it is it.
    ({1: DIES.format(15), 0: DIES.format(9)}, 'rank 1 was killed by SIGTERM'),
    ({1: DIES.format(15), 0: DIES.format(15), 2: DIES.format(15)}, ''),
    ({0: DIES.format(2)}, ''),
    # A goodbye, and an end that has been explained.
    ({1: 'line.send(b\'{"goodbye": 1}\\n\'); os._exit(0)',
      0: DIES.format(11)}, 'rank 0 was killed by SIGSEGV'),
    ({0: 'line.send(b\'{"all end": 1}\\n\'); os._exit(1)',
      1: DIES.format(9)}, ''),
])
def test_the_first_rank_that_dies_is_named_with_how(node, ends, said):
    for rank, how in ends.items():
        node.ended(rank, how)
    for rank in node.ranks:
        rank.kill()
    _, printed = node.watchdog.communicate()
    assert (said in printed) if said else not printed
    assert printed.count('in the middle of the job') == bool(said)


def test_of_two_deaths_that_are_seen_at_once_the_first_is_named(node):
    """Though the other rank had said something before."""
    node.watchdog.send_signal(signal.SIGSTOP)
    node.say(1, updates=1)
    node.ended(2, DIES.format(9))
    node.ended(1, DIES.format(9))
    node.watchdog.send_signal(signal.SIGCONT)
    assert 'rank 2 was killed by SIGKILL' in node.watchdog.communicate()[1]
