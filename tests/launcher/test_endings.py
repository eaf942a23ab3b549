"""How a start has ended, in words."""
from chainer_fp8pipe.launcher.endings import ending_of
from chainer_fp8pipe.launcher.job_output import JobOutput

import pytest


def output(**known):
    found = JobOutput()
    vars(found).update(known)
    return found


@pytest.mark.parametrize(('known', 'code', 'cause', 'failure'), [
    ({}, 0, 'its end, in order', ''),
    ({}, 3, 'exit code 3', 'exit code 3'),
    ({}, -9, 'what starts the ranks was killed by SIGKILL', ''),
    ({'dead': 'rank 1 was killed'}, 9, 'rank 1 was killed', ''),
    ({'dead': 'rank 0', 'stalled': 'it stands still'}, 75,
     'it stands still', ''),
    ({'failed': 'rank 1 of 2', 'error': 'KeyError: 1'}, 1,
     'rank 1 of 2: KeyError: 1', 'KeyError: 1'),
    ({'failed': 'rank 1 of 2'}, 1, 'rank 1 of 2: an exception',
     'an exception'),
])
def test_the_cause_is_who_has_died_or_what_failed(known, code, cause,
                                                  failure):
    found = ending_of(output(**known), code, False, False, False)
    assert (found.cause, found.failure) == (cause, failure)


def test_an_exit_code_may_be_that_of_a_network():
    assert ending_of(output(), 255, False, False, True).failure == ''
    assert ending_of(output(), 2, False, False, True).failure


def test_what_the_launcher_ends_is_nobodys_failure():
    found = ending_of(output(), 15, True, True, False)
    assert found.cause == 'the launcher, as all hosts answer again'
    assert (found.failure, found.progressed) == ('', True)
