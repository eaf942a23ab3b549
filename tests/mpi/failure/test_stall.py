"""When a job stands still, and why: what is healthy though nothing moves."""
import itertools
import sys
import threading
import time
import weakref

from chainer_fp8pipe.mpi.failure import stack, watch
from chainer_fp8pipe.mpi.failure.stack import Frame
from chainer_fp8pipe.mpi.failure.stall import (
    ACTION,
    GONE,
    LEFT,
    SECONDS,
    SILENT,
    STOPPED,
    WAITS,
    WORKS,
    RankView,
    StallRule,
    StallSettings,
    find_cause,
    settings_of_environment,
)
from chainer_fp8pipe.mpi.waiting import (
    Wait,
    current_waits,
    wait_until,
    waiting,
)

import pytest
from mpi4py import MPI

from tests.ranks import on_ranks


def view(rank, state, updates=5, **more):
    call = 'agree' if state == WAITS else ''
    return RankView(rank, f'rank {rank} of 2', state, updates=updates,
                    **{'call': call, **more})


def decisions(phases, settings=None, is_complete=True, usual=0.1):
    """When something is decided, and whether the job ends then.

    Each phase is its seconds and the ranks' views, or what makes the views
    of a second.
    """
    rule, now, found = StallRule(settings or StallSettings(), 8.0), 0.0, []
    for seconds, views in phases:
        for _ in range(seconds):
            now += 1.0
            made = views(now) if callable(views) else views
            decision = rule.look(now, made, usual, is_complete)
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
    assert decisions([TRAIN, (200, [view(0, WAITS), view(1, STOPPED)])],
                     usual=5.0) == [(102, True)]


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
    assert [bool(rule.look(now, views, 0.1, True)) for now in times] == [
        False] * 6 + [True]


def test_what_is_silent_keeps_the_count_of_its_updates():
    """Or it would be taken for a rank that makes none."""
    rule = StallRule(StallSettings(5.0), 8.0)
    decided = (rule.look(now, [view(0, WAITS), view(
        1, WAITS, -1 if now else 3, call='bcast')], 0.1, True)
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


# --- what a rank says of itself ----------------------------------------------

def reports(action, looks=2):
    """What the rank says of itself while its main thread is in an action."""
    found, inside, own = [], threading.Event(), watch._OwnRank()

    def look():
        inside.wait()
        for _ in range(looks):
            time.sleep(0.05)
            found.append(own.report(True))
    thread = threading.Thread(target=look)
    thread.start()

    def is_over():
        inside.set()
        return not thread.is_alive()
    action(is_over)
    thread.join()
    return found


def test_a_wait_that_polls_does_not_move_and_names_its_caller():
    first, last = reports(wait_until)
    assert stack.call(last['stack']) == 'test_stall.py:reports'
    assert 'test_stall.py' in stack.place(last['stack'])
    assert first['moves'] == last['moves']


def test_a_loop_of_waits_moves():
    times = itertools.count(1)

    def action(is_over):
        number = 0
        while not is_over():
            wait_until(lambda: next(times) % 50 == 0)
            number += 1
    assert len({said['moves'] for said in reports(action, looks=10)}) > 1


def test_work_is_no_wait():
    def work(is_over):
        while not is_over():
            time.sleep(0.001)
    assert stack.call(reports(work)[0]['stack']) == ''


def test_what_is_noted_is_told_by_the_outermost_that_knows():
    def action(is_over):
        with waiting(lambda: []), waiting(lambda: [Wait('frame 1', (3,))]):
            wait_until(is_over)
    assert reports(action)[0]['waits'] == [('frame 1', (3,))]
    assert current_waits() == []


def reports_in_mpi(wait, looks=3):
    """What the rank says while its main thread is in a call of MPI."""
    comm = MPI.COMM_SELF.Dup()
    found, own = [], watch._OwnRank()

    def look():
        while len(found) < looks:
            said = own.report(True)
            if stack.call(said['stack']).startswith('MPI'):
                found.append(said)
        comm.Send(bytearray(1), 0)
    thread = threading.Thread(target=look)
    thread.start()
    wait(comm, bytearray(1), MPI)
    thread.join()
    comm.Free()
    return found[-1]


@pytest.mark.parametrize('expression', [
    'comm.Recv(buffer)', 'comm.Recv(bytearray(len(str(1))))',
    'comm.Recv(\n    buffer,\n    source=MPI.ANY_SOURCE)'])
def test_a_rank_in_mpi_is_seen_to_wait_there(expression, tmp_path):
    path = tmp_path / 'script.py'
    path.write_text(f'def wait(comm, buffer, MPI):\n    {expression}\n')
    names = {}
    exec(compile(path.read_text(), str(path), 'exec'), names)
    said = reports_in_mpi(names['wait'])
    assert stack.call(said['stack']) == 'MPI: Recv'
    assert stack.place(said['stack']).startswith('script.py:')


@on_ranks(2)
def test_a_rank_that_has_an_intercommunicator_may_wait_for_others(comm):
    def wait(comm, buffer, MPI):
        comm.Recv(buffer)
    assert not reports_in_mpi(wait)['outside']
    local = comm.Split(comm.rank)
    kept = {'attribute': local.Create_intercomm(0, comm, 1 - comm.rank)}
    assert reports_in_mpi(wait)['outside']
    kept['attribute'].Free()
    assert not reports_in_mpi(wait)['outside']
    local.Free()


def test_what_looks_at_all_objects_asks_no_proxy():
    class Thing:
        pass
    thing = Thing()
    kept = [weakref.proxy(thing), {'dead': weakref.proxy(thing)}]
    del thing
    assert not watch._has_intercomm([sys._getframe()])
    assert len(kept) == 2


@pytest.mark.skipif(sys.version_info < (3, 11),
                    reason='Python says where in a line it is from 3.11 on')
def test_an_argument_that_is_computed_is_no_wait_for_ranks():
    class Reader:
        """Reads for a long time, in compiled code."""

        bcast = staticmethod(lambda *_: None)
        read = threading.Semaphore(0).acquire
    comm, found = Reader(), []

    def look():
        time.sleep(0.2)
        found.append(watch._OwnRank().report(True)['stack'])
        comm.read.__self__.release()
    thread = threading.Thread(target=look)
    thread.start()
    comm.bcast(comm.read(True, 100.0))
    thread.join()
    assert stack.call(found[0]) == ''


@pytest.mark.parametrize(('frame', 'call'), [
    (Frame('script.py', 1, 'main', 'Barrier'), 'MPI: Barrier'),
    (Frame('script.py', 1, 'main', 'recv'), ''),
    (Frame('/x/chainermn/base.py', 1, 'f', 'recv'), 'MPI: recv'),
    (Frame(f'{stack._OURS}mpi/groups.py', 1, 'gather', 'gather'),
     'MPI: gather'),
    (Frame(f'{stack._OURS}allreduce/engine.py', 1, 'finish'),
     'engine.py:finish'),
])
def test_what_is_a_wait(frame, call):
    assert stack.call([frame]) == call
    assert stack.call([]) == ''


def test_the_usual_duration_is_that_of_the_longest_kind(monkeypatch):
    updates, now = watch.UpdateCount(), [0.0]
    assert updates.usual_seconds() == 0.0
    monkeypatch.setattr(time, 'monotonic', lambda: now[0])
    for number in range(8):
        now[0] = number * 2.0
        updates.finished('slow')
        now[0] += 0.5
        updates.finished('quick' if number else 'slow')
    assert (updates.total, updates.usual_seconds()) == (16, 2.0)
