"""What a rank says of itself: where it is, and whether it waits."""
import itertools
import sys
import threading
import time
import weakref

from chainer_fp8pipe.mpi import watch
from chainer_fp8pipe.mpi.waiting import (
    Wait,
    current_waits,
    wait_until,
    waiting,
)
from chainer_fp8pipe.mpi.watchdog.stall import WAITS, WORKS

import pytest
from mpi4py import MPI

from tests.ranks import on_ranks


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
    assert last['call'] == 'test_watch.py:reports'
    assert 'test_watch.py' in last['where']
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
    assert reports(work)[0]['state'] == WORKS


def test_what_is_noted_is_told_by_the_outermost_that_knows():
    def action(is_over):
        with waiting(lambda: []), waiting(lambda: [Wait('frame 1', (3,))]):
            wait_until(is_over)
    said = reports(action)[0]
    assert (said['details'], said['waits_for']) == ('for frame 1', (3,))
    assert current_waits() == []


def reports_in_mpi(wait, looks=3):
    """What the rank says while its main thread is in a call of MPI."""
    comm = MPI.COMM_SELF.Dup()
    found, own = [], watch._OwnRank()

    def look():
        while len(found) < looks:
            said = own.report(True)
            if said['call'].startswith('MPI'):
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
    assert (said['state'], said['call']) == (WAITS, 'MPI: Recv')
    assert said['where'].startswith('at script.py:')


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
                    reason='needs Python 3.11, which knows the column')
def test_an_argument_that_is_computed_is_no_wait_for_ranks():
    class Reader:
        """Reads for a long time, in compiled code."""

        bcast = staticmethod(lambda *_: None)
        read = threading.Semaphore(0).acquire
    comm, found = Reader(), []

    def look():
        time.sleep(0.2)
        found.append(watch._OwnRank().report(True)['call'])
        comm.read.__self__.release()
    thread = threading.Thread(target=look)
    thread.start()
    comm.bcast(comm.read(True, 100.0))
    thread.join()
    assert found == ['']


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
