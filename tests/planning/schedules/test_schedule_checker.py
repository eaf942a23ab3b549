"""The checker finds what is wrong with a schedule."""
from dataclasses import replace

from chainer_fp8pipe.pipeline.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    forward_schedule,
    make_schedule,
)
from chainer_fp8pipe.planning.schedules.schedule_checker import check

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ...pipeline.graphs import is_sound

F, B = Kind.FORWARD, Kind.BACKWARD
BI, BW = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
SA, RA = Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION
SG, RG = Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT

quick = settings(max_examples=100)


def changed(schedule, rank, actions):
    """The schedule with other actions on one rank."""
    lists = list(schedule.actions)
    lists[rank] = tuple(actions)
    return replace(schedule, actions=tuple(lists))


def two_stages(first, second, micro_batches=2):
    """A schedule from lists of kind and micro-batch."""
    return Schedule('own', 2, micro_batches, 1, tuple(
        tuple(Action(kind, number, rank) for kind, number in actions)
        for rank, actions in enumerate((first, second))))


@st.composite
def schedules_and_ranks(draw):
    name = draw(st.sampled_from([*SCHEDULES, 'forward']))
    stages, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 3)) if name in (
        'interleaved', 'zero_bubble', 'forward') else 1
    schedule = (forward_schedule(stages, micro_batches, chunks)
                if name == 'forward' else
                make_schedule(name, stages, micro_batches, chunks))
    return schedule, draw(st.integers(0, stages - 1))


@quick
@given(schedules_and_ranks(), st.data())
def test_a_dropped_action_is_missed(schedule_and_rank, data):
    schedule, rank = schedule_and_rank
    actions = list(schedule.actions[rank])
    dropped = actions.pop(data.draw(st.integers(0, len(actions) - 1)))
    # Forward and backward without backward is an evaluation.
    assume([action.kind for action in actions] != [F])
    with pytest.raises(ScheduleError, match=f'rank {rank}: .*micro-batch '
                                            f'{dropped.micro_batch} '):
        check(changed(schedule, rank, actions))


@quick
@given(schedules_and_ranks(), st.data())
def test_an_action_that_is_there_twice_is_found(schedule_and_rank, data):
    schedule, rank = schedule_and_rank
    actions = list(schedule.actions[rank])
    twice = data.draw(st.sampled_from(actions))
    actions.insert(data.draw(st.integers(0, len(actions))), twice)
    with pytest.raises(ScheduleError) as caught:
        check(changed(schedule, rank, actions))
    assert str(caught.value) == f'rank {rank}: {twice} is there 2 times'


@quick
@given(schedules_and_ranks(), st.data())
def test_swapped_actions_are_judged_as_by_a_search_for_cycles(
        schedule_and_rank, data):
    schedule, rank = schedule_and_rank
    actions = list(schedule.actions[rank])
    places = st.integers(0, len(actions) - 1)
    one, other = data.draw(places), data.draw(places)
    actions[one], actions[other] = actions[other], actions[one]
    broken = changed(schedule, rank, actions)
    if is_sound(broken, schedule):
        check(broken)
    else:
        with pytest.raises(ScheduleError, match=r'rank \d'):
            check(broken)


@pytest.mark.parametrize('stages', [2, 3])
@quick
@given(data=st.data())
def test_random_orders_are_judged_as_by_a_search_for_cycles(stages, data):
    """Sound ones, too: the lists are merged, not shuffled."""
    schedule = make_schedule('gpipe', stages, 3)
    broken = schedule
    for rank, actions in enumerate(schedule.actions):
        forward = [action for action in actions if action.kind in (F, SA, RA)]
        backward = [action for action in actions if action not in forward]
        merged = []
        while forward or backward:
            merged.append((forward or backward).pop(0) if data.draw(
                st.booleans()) else (backward or forward).pop(0))
        broken = changed(broken, rank, merged)
    if is_sound(broken, schedule):
        check(broken)
    else:
        with pytest.raises(ScheduleError):
            check(broken)


def test_ranks_that_wait_for_each_other_are_named():
    """One at a time on rank 0, but rank 1 wants two before it goes back."""
    schedule = two_stages(
        [(F, 0), (SA, 0), (RG, 0), (B, 0), (F, 1), (SA, 1), (RG, 1), (B, 1)],
        [(RA, 0), (F, 0), (RA, 1), (F, 1), (B, 0), (SG, 0), (B, 1), (SG, 1)])
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert str(caught.value) == (
        "schedule 'own' comes to a deadlock: "
        'rank 0 waits for receive_gradient of micro-batch 0 (chunk 0), '
        'rank 1 waits for receive_activation of micro-batch 1 (chunk 1)')


FIRST = [(F, 0), (SA, 0), (F, 1), (SA, 1), (RG, 0), (B, 0), (RG, 1), (B, 1)]
SECOND = [(RA, 0), (F, 0), (RA, 1), (F, 1), (B, 0), (SG, 0), (B, 1), (SG, 1)]


def test_the_model_of_the_broken_ones_is_sound():
    assert check(two_stages(FIRST, SECOND)).peak_live == (2, 2)


@pytest.mark.parametrize(('first', 'second', 'message'), [
    (FIRST, [(F, 0), (RA, 0), *SECOND[2:]],
     'rank 1: forward of micro-batch 0 .chunk 1. comes before '
     'receive_activation of micro-batch 0 .chunk 1., which it needs'),
    ([(SA, 0), (F, 0), *FIRST[2:]], SECOND,
     'rank 0: send_activation of micro-batch 0 .* comes before forward'),
    ([*FIRST[:4], (B, 0), (RG, 0), *FIRST[6:]], SECOND,
     'rank 0: backward of micro-batch 0 .* before receive_gradient'),
    (FIRST, [*SECOND[:4], (SG, 0), (B, 0), *SECOND[6:]],
     'rank 1: send_gradient of micro-batch 0 .* before backward'),
    (FIRST, [*SECOND[:4], *SECOND[6:], *SECOND[4:6]],
     'rank 1: backward of micro-batch 1 .* before that of micro-batch 0'),
    ([(F, 0), (F, 1), (SA, 1), (SA, 0), *FIRST[4:]], SECOND,
     'rank 1: receive_activation of micro-batch 0 .* is where rank 0 has '
     'send_activation of micro-batch 1'),
    (FIRST, [*SECOND[:4], (B, 0), (B, 1), (SG, 1), (SG, 0)],
     'rank 0: receive_gradient of micro-batch 0 .* is where rank 1 has '
     'send_gradient of micro-batch 1'),
    ([*FIRST, (F, 2)], SECOND,
     'rank 0: forward of micro-batch 2 .* does not belong here'),
    (FIRST, [*SECOND, (SA, 0)],
     'rank 1: send_activation of micro-batch 0 .* does not belong here'),
    ([*FIRST, (BW, 0)], SECOND,
     'rank 0: backward_weight of micro-batch 0 .* does not belong here'),
    ([*FIRST[:5], (BI, 0), *FIRST[6:]], SECOND,
     'rank 0: backward_weight of micro-batch 0 .* is missing'),
    ([*FIRST[:5], (BW, 0), (BI, 0), *FIRST[6:]], SECOND,
     'rank 0: backward_weight of micro-batch 0 .* before backward_input'),
])
def test_what_is_wrong_is_said_with_rank_and_action(first, second, message):
    with pytest.raises(ScheduleError, match=message):
        check(two_stages(first, second))


def test_chunks_on_one_rank_need_each_other():
    schedule = make_schedule('interleaved', 1, 1, 2)
    first, second, *backwards = schedule.actions[0]
    with pytest.raises(ScheduleError, match='forward .*chunk 1.* before '
                                            'forward .*chunk 0'):
        check(changed(schedule, 0, (second, first, *backwards)))
    with pytest.raises(ScheduleError, match='backward .*chunk 0.* before '
                                            'backward .*chunk 1'):
        check(changed(schedule, 0, (first, second, *backwards[::-1])))


def test_an_action_of_another_ranks_chunk_does_not_belong_here():
    schedule = make_schedule('gpipe', 2, 1)
    strange = Action(F, 0, 1)
    with pytest.raises(ScheduleError, match='rank 0: .* not belong here'):
        check(changed(schedule, 0, (*schedule.actions[0], strange)))


def test_every_stage_needs_a_list_of_actions():
    schedule = make_schedule('gpipe', 3, 1)
    with pytest.raises(ScheduleError, match='for 2 ranks but 3 stages'):
        check(replace(schedule, actions=schedule.actions[:2]))


def test_a_micro_batch_may_go_back_in_halves_while_others_do_not():
    """It is live until its weight half is through."""
    first = [*FIRST[:5], (BI, 0), (RG, 1), (B, 1), (BW, 0)]
    with pytest.raises(ScheduleError, match='backward_weight of micro-batch 0'
                                            '|backward of micro-batch 1'):
        check(two_stages(first, SECOND))    # sums would be in another order
    report = check(two_stages(
        [*FIRST[:5], (BI, 0), (BW, 0), *FIRST[6:]], SECOND))
    assert report.peak_live == (2, 2)


def test_a_micro_batch_is_live_until_its_weight_half_is_through():
    steps = [(F, 0), (BI, 0), (F, 1), (BI, 1), (BW, 0), (F, 2), (BI, 2),
             (BW, 1), (BW, 2)]
    schedule = Schedule('own', 1, 3, 1, (tuple(
        Action(kind, number, 0) for kind, number in steps),))
    assert check(schedule).peak_live == (2,)


def test_units_are_one_for_each_half():
    report = check(make_schedule('gpipe', 1, 4))
    assert (report.length, report.idle_share) == (12, 0)
    report = check(two_stages(FIRST, SECOND))
    assert (report.length, report.idle_share) == (9, pytest.approx(1 / 3))
