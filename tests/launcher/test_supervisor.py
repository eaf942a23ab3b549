"""Whether a job starts again."""
from chainer_fp8pipe.launcher.attempt import Ending
from chainer_fp8pipe.launcher.launch_command import pause_after, verdict

import pytest

KILLED = Ending(9, 'rank 1 was killed', updates=[1, 9])
FURTHER = [KILLED._replace(updates=[number]) for number in range(1, 100)]
RAISED = Ending(1, 'rank 1: KeyError', 'KeyError', [1, 9])
AT_ONCE = RAISED._replace(updates=[])
USAGE = Ending(2, 'exit code 2', 'exit code 2')


@pytest.mark.parametrize(('endings', 'seconds'), [
    (13 * [KILLED], [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]),
    # After progress the next start comes at once, and counts anew.
    ([KILLED, KILLED, KILLED, FURTHER[5], FURTHER[5], FURTHER[5]],
     [0, 1, 2, 0, 1, 2]),
    ([AT_ONCE, KILLED, AT_ONCE, KILLED], [0, 0, 1, 2])])
def test_starts_from_the_same_place_wait_longer_each_time_up_to_a_limit(
        endings, seconds):
    assert [pause_after(endings[:number + 1])
            for number in range(len(endings))] == seconds
    assert verdict(endings, 20) == ''


@pytest.mark.parametrize(('endings', 'restarts', 'said'), [
    (3 * [KILLED], 4, ''), (4 * [KILLED], 4, '4 starts in a row'),
    ([KILLED], 1, '1 starts in a row'), (FURTHER, 2, ''),
    # The script's own failure, three times.
    (2 * [RAISED], 20, ''), (3 * [RAISED], 20, '3 starts in a row have fail'),
    (3 * [AT_ONCE], 20, '3 starts in a row have failed'),
    *(([RAISED, RAISED, between, RAISED, RAISED], 20, '')
      for between in (KILLED, RAISED._replace(failure='ValueError'))),
    ([RAISED, RAISED, RAISED._replace(updates=[2])], 20, ''),
    # A refusal of the command line is not tried again.
    ([USAGE], 20, 'is refused'), ([USAGE._replace(updates=[1])], 20, ''),
    ([KILLED._replace(code=2)], 20, ''),
    ([KILLED, Ending(0, '')], 1, 'done, after 2 starts')])
def test_what_would_fail_again_is_given_up(endings, restarts, said):
    found = verdict(endings, restarts)
    assert said in found
    assert bool(said) == bool(found)
