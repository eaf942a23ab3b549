"""What a rank's watch sees of the rank's main thread."""
import contextlib
import threading
import time
from unittest import mock

from chainer_fp8pipe.mpi.failure import own_state
from chainer_fp8pipe.mpi.failure.main_thread import (
    mpi_method,
    position,
    stack,
)
from chainer_fp8pipe.mpi.failure.own_state import OwnState, report_from
from chainer_fp8pipe.mpi.failure.update_count import UpdateCount
from chainer_fp8pipe.mpi.failure.waits import Wait, current_waits, waiting
from chainer_fp8pipe.mpi.waiting import wait_until

import pytest
from mpi4py import MPI


@contextlib.contextmanager
def clock():
    """A clock that the test advances."""
    with mock.patch.object(own_state.time, 'monotonic') as monotonic:
        monotonic.return_value = 100.0

        def wait(seconds):
            monotonic.return_value += seconds
        yield wait


def test_nothing_counts_before_the_first_update():
    with clock() as wait:
        updates = UpdateCount()
        own = OwnState(updates, longest=10)
        own.look()
        wait(5)
        own.look()
        assert (own.idle, own.report().idle) == (0.0, None)
        updates.finished('one')
        own.look()
        wait(5)
        own.look()
        assert own.report().idle == own.idle == 5


def test_a_process_that_was_stopped_begins_anew():
    with clock() as wait:
        updates = UpdateCount()
        updates.finished('one')
        own = OwnState(updates, longest=10)
        assert own.look()
        wait(9)
        assert own.look()
        wait(1000)
        assert not own.look()
        assert own.idle == 0


def looked_at(own, wait, action, looks=3):
    """Looks from another thread while the main thread is in an action."""
    found = []
    inside = threading.Event()

    def look():
        inside.wait()
        for _ in range(looks):
            wait(1)
            own.look()
            found.append(own.report())
    thread = threading.Thread(target=look)
    thread.start()

    def is_over():
        inside.set()
        return not thread.is_alive()
    action(is_over)
    thread.join()
    return found


def test_a_wait_that_polls_is_still_and_names_its_caller():
    with clock() as wait:
        *_, last = looked_at(OwnState(UpdateCount(), 10), wait, wait_until)
    assert last.state == 'WAITS'
    assert 'in tests.mpi.failure.test_own_state.looked_at; ' in last.details
    assert 'test_own_state.py' in last.details
    assert last.still >= 1


def test_work_is_no_wait():
    def work(is_over):
        while not is_over():
            time.sleep(0.001)
    with clock() as wait:
        *_, last = looked_at(OwnState(UpdateCount(), 10), wait, work)
    assert last.state == 'WORKS'
    assert 'test_own_state.py' in last.details


def test_what_is_noted_is_told_and_moves_when_the_note_changes():
    frame = [0]

    def note():
        frame[0] += 1
        return [Wait(f'frame {frame[0]} from rank 3', (3,))]

    def action(is_over):
        with waiting(lambda: []), waiting(note):
            wait_until(is_over)
    with clock() as wait:
        found = looked_at(OwnState(UpdateCount(), 10), wait, action)
    assert found[-1].waits_for == (3,)
    assert 'for frame ' in found[-1].details
    assert all(report.still == 0 for report in found)
    assert current_waits() == []


def test_a_report_survives_a_message():
    report = OwnState(UpdateCount(), 10).report()
    message = {**report._asdict(), 'waits_for': [1, 2], 'kind': 'report'}
    assert report_from(message) == report._replace(waits_for=(1, 2))


def test_the_usual_duration_is_that_of_the_longest_kind():
    updates = UpdateCount()
    with mock.patch('time.monotonic') as monotonic:
        for now in range(8):
            monotonic.return_value = now * 2.0
            updates.finished('slow')
            monotonic.return_value += 0.5
            updates.finished('quick' if now else 'slow')
    assert updates.total == 16
    assert updates.usual_seconds() == 2.0
    assert UpdateCount().usual_seconds() == 0.0


@pytest.mark.parametrize('call', [
    lambda comm: comm.Barrier(),
    lambda comm: comm.bcast(None, 0)])
def test_a_call_of_mpi_is_known_by_its_line(call):
    found = []

    class Comm:
        """Calls like one of mpi4py's, which have no frame."""

        Barrier = bcast = None
    comm = Comm()
    # ``map`` is compiled, and runs what it is given: like MPI, it is inside.
    comm.Barrier = comm.bcast = lambda *_: found.append(position())
    call(comm)
    assert found[0].call == ''      # a function of Python's has a frame
    assert mpi_method('script.py', ['x', 'Barrier']) == 'Barrier'
    assert mpi_method('script.py', ['recv']) == ''
    assert mpi_method('/x/chainermn/base.py', ['recv']) == 'recv'


def test_a_rank_in_mpi_is_seen_to_wait_there():
    comm = MPI.COMM_SELF.Dup()
    found = []

    def look():
        # Until the main thread is in the call.
        while not found or not found[-1].call:
            found.append(position())
        comm.Send(bytearray(1), 0)
    thread = threading.Thread(target=look)
    thread.start()
    comm.Recv(bytearray(1), 0)
    thread.join()
    comm.Free()
    assert found[-1].call == 'MPI: Recv'
    assert 'test_a_rank_in_mpi_is_seen_to_wait_there' in found[-1].place


def test_the_stack_is_the_main_threads():
    found = []
    thread = threading.Thread(target=lambda: found.append(stack()))
    thread.start()
    thread.join()
    assert 'test_the_stack_is_the_main_threads' in found[0]
