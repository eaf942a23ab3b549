"""What the local steps' benchmark derives from what it has measured."""
import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[2] / 'benchmarks'))
import local_steps
import near_exact_runs
from local_steps_ranks import EXACT, SYNCHRONOUS, UPDATES

MEDIANS = {'float32': 100.0, 'int4': 10.0, 'int4, not overlapped': 20.0,
           'int4, 8 local steps': 1.0, 'PyTorch, float32': 1000.0,
           'PyTorch, fp16 hook': 500.0, 'PyTorch, PostLocalSGD': 5.0}
FIRST = EXACT + SYNCHRONOUS


@pytest.mark.parametrize(('label', 'updates', 'seconds'), [
    ('float32', 50, 5000),
    ('int4', EXACT, 100 * EXACT),
    ('int4', 50, 100 * EXACT + 10 * (50 - EXACT)),
    ('int4, 8 local steps', FIRST - 1, 100 * EXACT + 20 * (SYNCHRONOUS - 1)),
    ('int4, 8 local steps', FIRST + 8,
     100 * EXACT + 20 * SYNCHRONOUS + 8),
    ('PyTorch, fp16 hook', 3, 1500),
    ('PyTorch, PostLocalSGD', FIRST + 8, 1000 * FIRST + 40),
])
def test_seconds_are_those_of_every_phase(label, updates, seconds):
    assert local_steps.seconds_of(label, updates, MEDIANS) == seconds


@pytest.mark.parametrize(('curve', 'updates'), [
    ([80, 91, 92, 90], 16),
    ([80, 91, 88, 90], UPDATES),        # lost again
    ([80, 85, 88, 89], None),
    ([89.5, 89.5, 89.5, 89.5], 8),      # half a point below is within
])
def test_an_accuracy_counts_from_where_it_is_not_lost_again(curve, updates):
    numbers = 8, 16, 24, UPDATES
    curves = [{'label': label, 'seed': 0, 'curve': list(
        zip(numbers, values, strict=True))}
              for label, values in (('float32', [50, 60, 70, 90]),
                                    ('int4', curve))]
    assert local_steps.reached(curves, 'int4') == updates


@pytest.mark.parametrize(('codec', 'least', 'most'), [
    ('float32', 4, 4), ('int4', .70, .71), ('int4, H=8', .12, .13),
    ('int4, half', .32, .36)])
def test_bytes_of_a_training_include_its_first_updates(codec, least, most):
    found = near_exact_runs.bytes_of(codec, 'digits', 4)
    assert least <= found <= most
