"""Whether and when a job starts again, and the table of its starts."""
from chainer_fp8pipe.launcher.one_start import Ending
from chainer_fp8pipe.launcher.supervisor import (
    EndedStart,
    RestartPolicy,
    format_duration,
    table,
)

import pytest

KILLED = Ending(9, 'rank 1 was killed', has_updated=True)
RAISED = Ending(1, 'rank 1: KeyError', 'KeyError', has_updated=True)
USAGE = Ending(2, 'exit code 2', 'exit code 2')


def waits(endings, restarts=20):
    policy = RestartPolicy(restarts, 60.0)
    return [policy.after(ending) for ending in endings], policy.verdict


def test_starts_in_vain_wait_longer_each_time_up_to_a_limit():
    found, verdict = waits(13 * [KILLED])
    assert found == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert not verdict


def test_after_progress_the_next_start_comes_at_once_and_counts_anew():
    found, verdict = waits([KILLED, KILLED, KILLED,
                            KILLED._replace(progressed=True), KILLED, KILLED])
    assert found == [0, 1, 2, 0, 0, 1]
    assert not verdict


def test_so_many_restarts_in_vain_are_the_last():
    assert not waits(3 * [KILLED], restarts=3)[1]
    assert '4 starts in a row' in waits(4 * [KILLED], restarts=3)[1]
    assert '1 starts in a row' in waits([KILLED], restarts=0)[1]


def test_progress_lets_a_job_die_as_often_as_it_likes():
    assert not waits(100 * [KILLED._replace(progressed=True)], restarts=1)[1]


def test_the_same_failure_of_the_script_three_times_in_a_row_is_enough():
    assert not waits(2 * [RAISED])[1]
    assert '3 starts in a row have failed' in waits(3 * [RAISED])[1]


def test_what_fails_twice_before_any_update_would_fail_again():
    at_once = RAISED._replace(has_updated=False)
    assert not waits([at_once])[1]
    assert '2 starts in a row have failed' in waits(2 * [at_once])[1]
    assert not waits([at_once, KILLED, at_once])[1]


@pytest.mark.parametrize('between', [
    KILLED, RAISED._replace(failure='ValueError'),
    RAISED._replace(progressed=True)])
def test_other_endings_in_between_let_the_script_fail_again(between):
    assert not waits([RAISED, RAISED, between, RAISED, RAISED])[1]


def test_a_refusal_is_not_tried_again():
    assert 'is refused' in waits([USAGE])[1]
    assert not waits([USAGE._replace(has_updated=True)])[1]
    assert not waits([KILLED._replace(code=2)])[1]


def test_too_few_hosts_are_asked_again_every_few_seconds():
    policy = RestartPolicy(3, 60.0)
    assert [policy.without_hosts(now) for now in range(10, 60, 10)] == [
        1, 2, 4, 5, 5]
    assert not policy.verdict


def test_hosts_that_are_away_for_too_long_end_it():
    policy = RestartPolicy(3, 60.0)
    policy.without_hosts(100.0)
    policy.without_hosts(159.9)
    assert not policy.verdict
    policy.without_hosts(160.0)
    assert '60 seconds (--wait-for-hosts)' in policy.verdict


def test_hosts_that_were_away_are_no_failures_of_the_job():
    policy = RestartPolicy(1, 60.0)
    for now in range(50):
        policy.without_hosts(now)
    assert policy.after(KILLED) == 0
    policy.without_hosts(1000.0)
    assert not policy.verdict


@pytest.mark.parametrize(('seconds', 'said'), [
    (1.23, '1.2 s'), (42.2, '42 s'), (130, '2 min 10 s'),
    (3599.9, '1 h 0 min'), (90_000, '25 h 0 min')])
def test_a_time_is_said_in_words(seconds, said):
    assert format_duration(seconds) == said


def test_each_start_has_a_row():
    head, first, second = table([
        EndedStart(0, 8, 1, 90, 100, 'rank 1 was killed'),
        EndedStart(0, 16, None, None, 2, 'exit code 3')]).splitlines()
    assert head.split() == ['start', 'at', 'ranks', 'updates', 'ran', 'ended',
                            'by']
    assert first.startswith('    1')
    assert first.endswith('      8     1-90  1 min 40 s  rank 1 was killed')
    assert second.endswith('     16     none       2.0 s  exit code 3')
