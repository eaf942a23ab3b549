"""Ways to run a job: what they are called, given and saved as."""
import json

from chainer_fp8pipe.planning.job.configuration import (
    Configuration,
    configuration_of,
)
from chainer_fp8pipe.planning.partition.partition_plan import PartitionPlan
from chainer_fp8pipe.planning.partition.positions import Position

import pytest
from hypothesis import given
from hypothesis import strategies as st


def cut(stages=2, micro_batches=4, schedule='1f1b', chunks=1,
        recompute=False):
    parts = stages * chunks
    return PartitionPlan(
        tuple((f'/{part}/W',) for part in range(parts)),
        tuple(Position(part, 0) for part in range(1, parts)), stages,
        (recompute,) * parts, micro_batches, schedule)


@st.composite
def configurations(draw):
    stages = draw(st.integers(1, 3))
    micro_batches = draw(st.integers(1, 9)) if stages > 1 else 1
    return Configuration(
        draw(st.integers(1, 9)), stages, micro_batches,
        cut(stages, micro_batches, draw(st.sampled_from(
            ['interleaved', 'zero_bubble'])), draw(st.integers(1, 2)),
            draw(st.booleans())) if stages > 1 else None,
        draw(st.sampled_from(['float32', 'float16', 'fp8'])),
        draw(st.sampled_from(['direct', 'ring', 'torus2d'])),
        draw(st.sampled_from([False, True, 'next_forward'])),
        draw(st.sampled_from([{}, {'shape': (2, 3)}, {
            'frame_bytes': 1024, 'two_level': 'no'}])))


@given(configurations())
def test_what_was_saved_is_read_again(way):
    assert configuration_of(json.loads(json.dumps(way.as_dict()))) == way


@pytest.mark.parametrize(('way', 'said'), [
    (Configuration(), 'one rank'),
    (Configuration(4, codec='fp8', algorithm='ring'),
     '4 replicas, fp8 ring'),
    (Configuration(2, overlap=True), '2 replicas, float32 direct, overlapped'),
    (Configuration(6, algorithm='torus2d', overlap='next_forward',
                   options={'shape': (2, 3)}),
     '6 replicas, float32 torus2d shape=2x3, waiting in the next forward'),
    (Configuration(1, 2, 4, cut()), '2 stages x 1, 4 micro-batches, 1f1b'),
    (Configuration(3, 2, 4, cut(schedule='gpipe', recompute=True), 'float16'),
     '2 stages x 3, 4 micro-batches, gpipe, recomputing, float16 direct')])
def test_a_configuration_is_said_in_a_line(way, said):
    assert str(way) == said


def test_a_communicator_is_given_what_is_not_its_default():
    assert Configuration(4).communicator_options() == {'algorithm': 'direct'}
    assert Configuration(4, algorithm='ring', overlap='next_forward', options={
        'frame_bytes': 512}).communicator_options() == {
            'algorithm': 'ring', 'overlap': 'next_forward',
            'frame_bytes': 512}


def test_the_schedule_is_that_of_the_cut():
    assert Configuration(4).schedule == ''
    assert Configuration(1, 2, 4, cut()).schedule == '1f1b'


@pytest.mark.parametrize(('change', 'message'), [
    ({'replicas': 0}, 'replicas must be a number of at least 1, not 0'),
    ({'stages': -2}, 'stages must be a number of at least 1, not -2'),
    ({'micro_batches': 0}, 'micro_batches must be a number of at least 1'),
    ({'micro_batches': '4'}, "micro_batches must be .*, not '4'"),
    ({'replicas': True}, 'replicas must be a number .*, not True'),
    ({'cut': None}, '2 stages need a cut'),
    ({'stages': 1}, '1 stages need no cut'),
    ({'micro_batches': 5}, 'the cut is for 2 stages and 4 micro-batches, the '
                           'plan for 2 and 5'),
    ({'stages': 4}, 'for 2 stages .*, the plan for 4 and 4'),
    ({'codec': 'fp4'}, "codec must be one of 'float32', .*, not 'fp4'"),
    ({'algorithm': 'star'}, "algorithm must be one of .*, not 'star'"),
    ({'overlap': 'always'}, "overlap must be .*, not 'always'"),
    ({'cut': cut(schedule='zigzag').as_dict()}, "no schedule 'zigzag'"),
    ({'cut': cut(chunks=2).as_dict()}, "'1f1b' has one chunk per rank")])
def test_parts_that_contradict_each_other_are_named(change, message):
    data = {**Configuration(2, 2, 4, cut()).as_dict(), **change}
    with pytest.raises(ValueError, match=message):
        configuration_of(data)
