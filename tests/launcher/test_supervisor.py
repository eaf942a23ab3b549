"""What is saved, whether a job starts again, and the table of attempts."""
import os
import shutil

from chainer_fp8pipe.launcher.output import Ending
from chainer_fp8pipe.launcher.supervisor import (
    SavedProgress,
    pause_after,
    saved_progress,
    table,
    verdict,
)
from chainer_fp8pipe.training.snapshots.file import folder_of

import pytest

KILLED = Ending(9, 'rank 1 was killed', first=1)
PROGRESSED = KILLED._replace(progressed=True)
RAISED = Ending(1, 'rank 1: KeyError', 'KeyError', first=1)
USAGE = Ending(2, 'exit code 2', 'exit code 2')


@pytest.mark.parametrize(('endings', 'seconds'), [
    (13 * [KILLED], [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]),
    # After progress the next start comes at once, and counts anew.
    ([KILLED, KILLED, KILLED, PROGRESSED, KILLED, KILLED],
     [0, 1, 2, 0, 0, 1]),
])
def test_starts_in_vain_wait_longer_each_time_up_to_a_limit(
        endings, seconds):
    assert [pause_after(endings[:number + 1])
            for number in range(len(endings))] == seconds
    assert verdict(endings, 20) == ''


AT_ONCE = RAISED._replace(first=None)


@pytest.mark.parametrize(('endings', 'restarts', 'said'), [
    (3 * [KILLED], 3, ''), (4 * [KILLED], 3, '4 starts in a row'),
    ([KILLED], 0, '1 starts in a row'), (100 * [PROGRESSED], 1, ''),
    # The script's own failure, three times, or twice before any update.
    (2 * [RAISED], 20, ''), (3 * [RAISED], 20, '3 starts in a row have fail'),
    ([AT_ONCE], 20, ''), (2 * [AT_ONCE], 20, '2 starts in a row have failed'),
    ([AT_ONCE, KILLED, AT_ONCE], 20, ''),
    *(([RAISED, RAISED, between, RAISED, RAISED], 20, '')
      for between in (KILLED, RAISED._replace(failure='ValueError'),
                      RAISED._replace(progressed=True))),
    # A refusal of the command line is not tried again.
    ([USAGE], 20, 'is refused'),
    ([USAGE._replace(first=1)], 20, ''),
    ([KILLED._replace(code=2)], 20, ''),
])
def test_what_would_fail_again_is_given_up(endings, restarts, said):
    found = verdict(endings, restarts)
    assert said in found
    assert bool(said) == bool(found)


def test_each_start_has_a_row():
    head, first, second = table([
        Ending(9, 'rank 1 was killed', '', 1, 90, True, 0, 100),
        Ending(3, 'exit code 3', seconds=2)]).splitlines()
    assert head.split() == ['start', 'at', 'updates', 'ran', 'ended', 'by']
    assert first.startswith('    1')
    assert first.endswith('     1-90  1 min 40 s  rank 1 was killed')
    assert second.endswith('     none         2 s  exit code 3')


def test_the_snapshot_that_is_furthest_is_found(tmp_path):
    """That of a later Trainer is further than any of an earlier one."""
    assert saved_progress(None) == SavedProgress()
    assert saved_progress(str(tmp_path / 'nowhere')) == SavedProgress()
    def saved(folder, update, written=2):
        path = folder_of(str(folder), update)
        os.makedirs(path)
        for rank in range(written):
            open(f'{path}/rank{rank}of2.npz', 'w').close()
        return path
    for name in 'snapshot_iter_200', 'log':
        (tmp_path / name).touch()
    saved(tmp_path, 9)
    saved(tmp_path, 100)
    half = saved(tmp_path, 300, written=1)
    found = saved_progress(str(tmp_path))
    assert found == (1, 100, str(tmp_path / 'snapshot_iter_100.ranks'))
    assert found > SavedProgress()
    for trainer, update in ('2', 50), ('3', 1), ('x', 900):
        saved(tmp_path / trainer, update)
    assert saved_progress(str(tmp_path))[:2] == (3, 1)
    for trainer in '23':
        shutil.rmtree(tmp_path / trainer)
    # Of a host with a disk of its own.
    os.utime(half, (0, 0))
    assert saved_progress(str(tmp_path))[:2] == (1, 300)


