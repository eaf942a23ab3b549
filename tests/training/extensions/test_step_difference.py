"""What is said of steps that take another time than predicted."""
from chainer_fp8pipe.training.extensions.step_difference import explain
from chainer_fp8pipe.training.extensions.step_parts import PARTS

import numpy
import pytest

from .made_up import plan_for

PREDICTED = dict(zip(PARTS, (0.060, 0.010, 0.020, 0.008, 0.002),
                     strict=True))


def rows(*of_ranks):
    """Seconds of ranks: the whole, and the parts that add up to it."""
    return numpy.array([[sum(parts.values()), *parts.values()]
                        for parts in of_ranks])


def said(*of_ranks, actual=(), **choice):
    return explain(plan_for(len(of_ranks), PREDICTED, **choice),
                   rows(*of_ranks), dict(actual))


@pytest.mark.parametrize(('part', 'remedy'), [
    ('forward and backward', 'Other programs may use the cores'),
    ('waiting for stages', 'A stage is slower than'),
    ('exchange', 'A link is slower than'),
    ('update', 'plan(..., optimizer=...)'),
    ('other', 'read beside the training')])
def test_the_part_with_the_largest_difference_has_its_remedy(part, remedy):
    found = said({**PREDICTED, part: PREDICTED[part] + 0.1})
    assert 'a step takes 200 ms, 100 % more than the predicted 100 ms (+- ' \
        '10 %)' in found
    assert f'The largest difference is {part}, by 100 ms. ' in found
    assert remedy in found
    for name, seconds in PREDICTED.items():
        measured = seconds + 0.1 * (name == part)
        assert f'{name} {1e3 * measured:.4g} ms {1e3 * seconds:.4g} ms' in (
            ' '.join(found.split()))


def test_steps_that_are_too_short_are_a_reason_to_plan_again():
    found = said({**PREDICTED, 'exchange': 0.001,
                  'forward and backward': 0.055})
    assert '24 % less' in found
    assert 'The largest difference is exchange, by 19 ms. The machine was ' \
        'busier' in found


def test_the_rank_that_computes_longest_is_shown():
    waits = {**PREDICTED, 'exchange': 0.110, 'forward and backward': 0.050}
    slow = {**PREDICTED, 'forward and backward': 0.140}
    found = said(waits, waits, slow, waits)
    assert 'Of rank 2,' in found
    assert 'The largest difference is forward and backward, by 80 ms' in found
    assert 'Rank 2 computes for 2.8 times as long as the median rank' in found


def test_stages_of_a_pipeline_may_compute_for_unequal_times():
    light = {**PREDICTED, 'forward and backward': 0.010}
    heavy = {**PREDICTED, 'forward and backward': 0.140}
    assert 'median rank' not in said(light, light, heavy, stages=3)


def test_parts_that_hardly_count_are_left_out():
    found = said({**PREDICTED, 'exchange': 0.9})
    assert 'other' not in found.partition('The largest')[0]


def test_an_update_in_the_next_forward_pass_is_a_part_of_the_passes():
    found = said({**PREDICTED, 'update': 0.0, 'forward and backward': 0.168},
                 overlap='next_forward')
    assert 'forward and backward, update 168 ms 68 ms' in (
        ' '.join(found.split()))
    assert 'Other programs' in found


def test_another_way_to_run_the_job_is_named():
    found = said(*2 * [{**PREDICTED, 'exchange': 0.2}], codec='fp8',
                 algorithm='ring', actual={
                     'codec': 'float32', 'algorithm': 'ring', 'stages': 1})
    assert "The plan is for codec='fp8' and this job has 'float32': have" in (
        found)
    assert 'algorithm' not in found
