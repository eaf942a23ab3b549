"""What a rank says of itself, and whom the watch takes for the cause."""
import threading
import time
from types import SimpleNamespace

from chainer_fp8pipe.mpi import watch
from chainer_fp8pipe.mpi.waiting import (
    Wait,
    current_waits,
    wait_until,
    waiting,
)
from chainer_fp8pipe.mpi.watch import (
    LEFT,
    SILENT,
    WAITS,
    WORKS,
    UpdateCount,
    View,
    doing,
    find_cause,
)

import pytest
from mpi4py import MPI

from tests.ranks import on_ranks


@pytest.fixture(autouse=True)
def without_threads_of_pytest(monkeypatch):
    """Where tests go side by side, one reads what pytest says."""
    is_idle = watch._is_idle
    monkeypatch.setattr(watch, '_is_idle', lambda thread, frames: is_idle(
        thread, frames) or any('execnet' in frame.f_code.co_filename
                               for frame in frames))


def says(action, looks=2):
    """What the rank says of itself while its main thread is in an action."""
    found, inside = [], threading.Event()

    def look():
        inside.wait()
        for _ in range(looks):
            time.sleep(0.05)
            found.append(doing(View(0, '')))
    thread = threading.Thread(target=look)
    thread.start()

    def is_over():
        inside.set()
        return not thread.is_alive()
    action(is_over)
    thread.join()
    return found


def works(is_over):
    while not is_over():
        time.sleep(0.001)


def waits_as_noted(is_over):
    with waiting(lambda: []), waiting(lambda: [Wait('frame 1', (3,))]):
        wait_until(is_over)


@pytest.mark.parametrize(('action', 'state', 'words', 'waits_for'), [
    (wait_until, WAITS, 'in says; at test_watch.py:', ()),
    (works, WORKS, 'at test_watch.py:', ()),
    # What is noted is told by the outermost that knows.
    (waits_as_noted, WAITS, 'for frame 1; at test_watch.py:', (3,))])
def test_a_rank_says_whether_it_waits_and_where(action, state, words,
                                                waits_for):
    first, last = says(action)
    assert (last.state, last.waits_for) == (state, waits_for)
    assert last.words.startswith(words)
    assert first == last or state == WORKS      # it does not move
    assert current_waits() == []


def polls(is_over):
    count = 0
    with waiting(lambda: [Wait('frame 1')]):
        while not is_over():
            count += 1
            time.sleep(0.001)


@pytest.mark.parametrize('is_mover', [False, True])
def test_a_rank_moves_on_unless_frames_that_poll_alone_change(
        monkeypatch, is_mover):
    if is_mover:
        monkeypatch.setattr(watch, '_MOVERS', (__file__,))
    first, last = says(polls)
    assert (first.moves == last.moves) == is_mover


def naps(over, comm):
    while not over.is_set():
        time.sleep(0.01)


def naps_before_it_sends(over, comm):
    return [time.sleep(1) for _ in 'ab'], comm.Send(bytearray(1), 0)


def gets(over, comm):
    over.wait()


def receives(over, comm):
    comm.Recv(bytearray(1), 0)


@pytest.mark.parametrize(('thread', 'state'), [
    (naps, WORKS), (naps_before_it_sends, WORKS), (gets, WAITS),
    (receives, WAITS)])
def test_a_rank_may_act_where_another_thread_of_it_does(thread, state):
    over, comm = threading.Event(), MPI.COMM_SELF.Dup()
    other = threading.Thread(target=thread, args=[over, comm], name='loader')
    other.start()
    said = says(wait_until)[0]
    over.set()
    if thread is receives:
        comm.Send(bytearray(1), 0)
    if thread is naps_before_it_sends:
        comm.Recv(bytearray(1), 0)
    other.join()
    comm.Free()
    assert said.state == state
    assert ('its thread loader may act, at test_watch.py' in said.words) == (
        state == WORKS)


@pytest.mark.parametrize('wait', [
    lambda owner: owner.comm.Recv(bytearray(1)),
    lambda owner: owner.comm.Recv(
        bytearray(1),
        source=MPI.ANY_SOURCE),
    lambda owner: int(owner.comm.Recv(bytearray(len(str(1)))) or 0)])
def test_a_rank_in_mpi_is_seen_to_wait_there(wait):
    comm, found = MPI.COMM_SELF.Dup(), []

    def look():
        end = time.monotonic() + 2
        while time.monotonic() < end and not (
                found and found[-1].state == WAITS):
            found.append(doing(View(0, '')))
        comm.Send(bytearray(1), 0)
    thread = threading.Thread(target=look)
    thread.start()
    wait(SimpleNamespace(comm=comm))
    thread.join()
    comm.Free()
    # Before Python 3.11 a line tells less.
    assert hasattr(look.__code__, 'co_positions') is False or found[
        -1].words.startswith('in MPI: Recv; at test_watch.py:')


@pytest.mark.parametrize(('kinds', 'limit'), [
    ('a' * 100, 120),               # of 0.1 s each
    ('A' * 100, 160),               # of 2 s each
    ('a' * 100 + 'A', 120),         # averaged once in a while
    (('a' * 200 + 'A') * 3, 120),
    ('aA' * 50, 120),               # a quick one follows
    ('aA' * 50 + 'a', 160),         # the slow one is under way
    ('A' * 100 + 'a' * 5, 120),     # what is over is forgotten
])
def test_the_limit_is_of_the_kind_of_update_that_is_under_way(
        monkeypatch, kinds, limit):
    count, now = UpdateCount(), [0.0]
    monkeypatch.setattr(time, 'monotonic', lambda: now[0])
    for kind in kinds:
        now[0] += 2.0 if kind == 'A' else 0.1
        count.finished(kind)
    assert count.total == len(kinds)
    assert count.limit() == limit


@on_ranks(2)
def test_a_variable_with_a_wrong_value_is_an_error_on_all_ranks(comm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(watch.SECONDS, 'soon' if comm.rank else '7')
        with pytest.raises(ValueError, match=f'{watch.SECONDS} must be sec'):
            watch.Watch().watch(comm)


def view(rank, state=WAITS, call='x', waits_for=(), updates=7):
    return View(rank, f'rank {rank}', state, call, waits_for, 0, updates,
                99.0)


#: What ranks do; who is named; after how many limits, and whether the job
#: ends then, without and with seconds that are given.
ENDS, SLOWLY, WARNS = ((1, True),) * 2, ((3, True),) * 2, (
    (3, False), (1, True))
CAUSES = {
    'one has left': ([view(0), view(1, LEFT)],
                     'rank 1, which others wait for', ENDS),
    'one has left and another works': (
        [view(0), view(1, LEFT), view(2, WORKS)],
        'rank 2, behind which others wait', WARNS),
    'one does not answer': ([view(0), view(1, SILENT)],
                            'rank 1, behind which', SLOWLY),
    'one may act': ([view(0), view(1, WORKS)], 'rank 1, behind which', WARNS),
    'all wait for one': ([view(0, waits_for=(1,)), view(1), view(
        2, waits_for=(1,))], 'rank 1, for which others wait', ENDS),
    'one is in another call': ([view(0), view(1), view(2, call='y')],
                               'rank 2, in another call', ENDS),
    'all in the same call': ([view(0), view(1)], 'in the same place', ENDS),
    'calls differ': ([view(0), view(1, call='y')], 'in different calls',
                     ENDS),
    # It makes no updates and is no cause.
    'an aggregator': ([view(0), view(1), view(2, call='y', updates=0)],
                      'in the same place', ENDS),
}


@pytest.mark.parametrize('name', CAUSES)
def test_the_cause_and_how_long_it_is_waited_for(name):
    views, said, ends = CAUSES[name]
    for is_given, (limits, job_ends) in enumerate(ends):
        for quiet in 0.9, 2.9, 99.0:
            found = find_cause([views[0]._replace(limits=quiet), *views[1:]],
                               bool(is_given))
            assert bool(found[0]) == (quiet > limits)
        assert said in found[0]
        assert found[1] == job_ends
        assert ('equally many batches' in found[0]) == (
            name in ('one has left', 'calls differ',
                     'one is in another call'))
    assert find_cause([view(0, WORKS), view(1, LEFT)], True) == ('', False)
