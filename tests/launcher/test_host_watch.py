"""Hosts that are away, and back."""
from chainer_fp8pipe.launcher import host_watch
from chainer_fp8pipe.launcher.host_watch import HostWatch
from chainer_fp8pipe.launcher.hosts import Share
from chainer_fp8pipe.launcher.saved_progress import SavedProgress

import pytest

ROOM = [Share('a', 4), Share('b', 4)]
OLD, NEW = SavedProgress(1, 5, 'old'), SavedProgress(1, 9, 'new')


@pytest.fixture
def watched(monkeypatch):
    """A watch over two hosts, those that are up, and what it has said."""
    monkeypatch.setattr(host_watch, '_LOOK', 0.0)
    up, said = {'a', 'b'}, []
    watch = HostWatch(ROOM, 8, 4, 1, up.__contains__, said.append)
    yield watch, up, said
    watch.close()


def until_asked(watch, saved):
    """Looks until a look has had an answer, or the job is to end."""
    for _ in range(1000):
        if watch.look(lambda: saved) or watch._are_back:
            return watch.wants_all_back
        if watch._question is not None:
            watch._question.result()
    return False


def test_all_hosts_take_part_if_all_answer(watched):
    watch, _, said = watched
    assert watch.shares() == ROOM
    watch.begin(OLD)
    assert not watch.look(lambda: NEW)
    assert not said


def test_hosts_that_do_not_answer_are_left_out(watched):
    watch, up, said = watched
    up.remove('a')
    assert watch.shares() == ROOM[1:]
    assert said == ['without an answer: a']


def test_too_few_ranks_are_none(watched):
    watch, up, said = watched
    watch._fewest = 5
    up.remove('a')
    assert watch.shares() is None
    assert '5 are needed (--min-ranks)' in said[-1]


def test_hosts_that_are_asked_again_and_again_are_named_once(watched):
    watch, up, said = watched
    watch._fewest = 5
    up.remove('a')
    for _ in range(3):
        watch.shares()
    assert len(said) == 2
    watch.begin(OLD)
    watch.shares()
    assert len(said) == 4


def test_where_no_host_answers_the_question_is_doubted(watched):
    watch, up, said = watched
    up.clear()
    assert watch.shares() == ROOM
    assert '--probe' in said[0]


def test_a_job_ends_for_a_host_that_is_back_only_after_a_snapshot(watched):
    watch, up, said = watched
    up.remove('a')
    watch.shares()
    watch.begin(OLD)
    up.add('a')
    assert not until_asked(watch, OLD)
    assert 'a answers again' in said[-1]
    assert not watch.look(lambda: OLD)
    assert watch.look(lambda: NEW)
    assert watch.wants_all_back
    watch.begin(NEW)
    assert not watch.wants_all_back


def test_a_job_without_hosts_of_its_own_asks_nobody():
    watch = HostWatch([Share('', 4)], 4, 4, 1, lambda host: 1 / 0, print)
    assert watch.shares() == [Share('', 4)]
    watch.close()
