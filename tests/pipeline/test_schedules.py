"""Schedules are complete, in order, and as good as they are said to be."""
from fractions import Fraction

from chainer_fp8pipe.pipeline.schedules import (
    SCHEDULES,
    Kind,
    make_schedule,
    recomputed,
)

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .graphs import is_sound, length, peak_live

STAGES = st.integers(1, 8)
MICRO_BATCHES = st.integers(1, 20)
CHUNKS = st.integers(1, 4)

quick = settings(max_examples=30)


@st.composite
def schedules(draw):
    name = draw(st.sampled_from([*SCHEDULES, 'forward']))
    chunks = 1 if name in ('gpipe', '1f1b') else draw(CHUNKS)
    return make_schedule(name, draw(STAGES), draw(MICRO_BATCHES), chunks)


def idle(schedule):
    """The idle share as an exact fraction, from the length of the step."""
    work = 3 * schedule.micro_batches * schedule.chunks
    return 1 - work / Fraction(length(schedule))


# --- what holds for all -----------------------------------------------------

@quick
@given(schedules())
def test_every_schedule_can_be_carried_out(schedule):
    assert is_sound(schedule)


@quick
@given(schedules())
def test_every_chunk_computes_every_micro_batch_once_in_order(schedule):
    found = {}
    for rank, actions in enumerate(schedule.actions):
        for kind, number, chunk in actions:
            assert chunk % schedule.stages == rank
            found.setdefault((kind, chunk), []).append(number)
    backwards = {'forward': [], 'zero_bubble': [
        Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]}.get(
            schedule.name, [Kind.BACKWARD])
    computing = {Kind.FORWARD, *backwards}
    wanted = list(range(schedule.micro_batches))
    assert found.keys() == {(kind, chunk) for kind in computing
                            for chunk in range(schedule.last_chunk + 1)}
    assert all(numbers == wanted for numbers in found.values())


# --- figures of each --------------------------------------------------------

@quick
@given(schedules())
def test_no_rank_waits_longer_than_said(schedule):
    stages, count, chunks = (schedule.stages, schedule.micro_batches,
                             schedule.chunks)
    if schedule.name == 'forward':
        return
    # (d - 1) (F + I - W) units of waiting for halves (Qi et al.).
    units = 3 if schedule.name == 'zero_bubble' else 1
    share = Fraction(stages - 1, units * chunks * count + stages - 1)
    if count >= stages or chunks == units == 1:
        assert idle(schedule) == share
    else:
        assert idle(schedule) <= idle(make_schedule('1f1b', stages, count))


@quick
@given(schedules())
def test_no_rank_keeps_more_than_said(schedule):
    stages, count, chunks = (schedule.stages, schedule.micro_batches,
                             schedule.chunks)
    found = peak_live(schedule)
    if schedule.name == 'gpipe':
        assert found == (count,) * stages
    elif schedule.name == 'zero_bubble':
        assert max(found) <= max(peak_live(make_schedule(
            'interleaved', stages, count, chunks)))
    elif schedule.name != 'forward' and chunks == 1:
        assert found == tuple(min(stages - rank, count)
                              for rank in range(stages))
    elif schedule.name != 'forward' and count % stages == 0:
        # What Megatron keeps: warm-up, one more.
        assert found == tuple(
            min(chunks * stages + stages - 2 * rank - 1, count * chunks)
            for rank in range(stages))


# --- single cases -----------------------------------------------------------

def test_integers_of_numpy_are_numbers_too():
    assert (make_schedule('gpipe', numpy.int64(2), numpy.int32(3))
            == make_schedule('gpipe', 2, 3))


@pytest.mark.parametrize(('arguments', 'message'), [
    (('fastest', 2, 4), "no schedule 'fastest'.* gpipe, 1f1b, interleaved, "
                        'zero_bubble'),
    (('gpipe', 0, 4), 'stages is 0; .* at least 1'),
    (('gpipe', 2, -1), 'micro_batches is -1; .* at least 1'),
    (('interleaved', 2, 4, 0), 'chunks is 0; .* at least 1'),
    (('1f1b', 2, 4, 2), "'1f1b' has one chunk .* 2; only 'interleaved' and "
     "'zero_bubble'"),
    (('1f1b', 2.0, 4), 'stages is 2.0; .* whole number'),
    (('1f1b', 2, '4'), "micro_batches is '4'; .* whole number"),
])
def test_wrong_arguments_are_told_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)


@pytest.mark.parametrize(('given', 'chunks'), [
    (True, {0, 1, 2}), (False, set()), ((True, False, True), {0, 2}),
    ((False, False, False), set())])
def test_what_is_recomputed(given, chunks):
    assert recomputed(given, 2) == chunks


@pytest.mark.parametrize('given', [
    'sometimes', (), (True,), (True, False), ('yes', 'no', 'no')])
def test_an_unknown_choice_is_an_error_that_lists_the_known(given):
    with pytest.raises(ValueError, match='recompute must be True, False or a '
                                         'tuple .* of 3 chunks, not'):
        recomputed(given, 2)
