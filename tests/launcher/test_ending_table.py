"""The summary of starts."""
from chainer_fp8pipe.launcher.ending_table import (
    EndedStart,
    said_seconds,
    table,
)

import pytest


@pytest.mark.parametrize(('seconds', 'said'), [
    (1.23, '1.2 s'), (42.2, '42 s'), (130, '2 min 10 s'),
    (3599.9, '1 h 0 min'), (90_000, '25 h 0 min')])
def test_a_time_is_said_in_words(seconds, said):
    assert said_seconds(seconds) == said


def test_each_start_has_a_row():
    head, first, second = table([
        EndedStart(0, 8, 1, 90, 100, 'rank 1 was killed'),
        EndedStart(0, 16, None, None, 2, 'exit code 3')]).splitlines()
    assert head.split() == ['start', 'at', 'ranks', 'updates', 'ran', 'ended',
                            'by']
    assert first.startswith('    1')
    assert first.endswith('      8     1-90  1 min 40 s  rank 1 was killed')
    assert second.endswith('     16     none       2.0 s  exit code 3')
