"""The checker finds what is wrong with a plan."""
from dataclasses import replace

from chainer_fp8pipe.allreduce.plan import (
    Instruction,
    Opcode,
    Plan,
    aggregator,
    direct,
    ring,
)
from chainer_fp8pipe.planning.allreduce.plan_checker import PlanError, check

import numpy
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ...allreduce.plans import Stuck, interpret, plans

SP, RP, EN = Opcode.SEND_PARTIAL, Opcode.RECEIVE_PARTIAL, Opcode.ENCODE
SR, RR = Opcode.SEND_RESULT, Opcode.RECEIVE_RESULT

quick = settings(max_examples=150)


def changed(plan, half, rank, actions):
    """The plan with other actions in one half of one rank."""
    parts = list(getattr(plan, half))
    parts[rank] = tuple(actions)
    return replace(plan, **{half: tuple(parts)})


def error_of(plan):
    with pytest.raises(PlanError) as caught:
        check(plan)
    return str(caught.value)


@st.composite
def places(draw):
    """A plan, one of its halves, a rank, and what it does there."""
    plan = draw(plans(8))
    half = draw(st.sampled_from(['reduce', 'gather']))
    rank = draw(st.integers(0, plan.ranks - 1))
    actions = list(getattr(plan, half)[rank])
    assume(actions)
    return plan, half, rank, actions


def gives_the_mean(plan):
    if any(not 0 <= action.start <= action.stop <= plan.blocks
           for rank in range(plan.ranks) for action in plan.actions(rank)):
        return False        # there are no such blocks
    vectors = numpy.random.default_rng(0).normal(
        size=(plan.workers, 2 * plan.blocks))
    try:
        results = interpret(plan, vectors)
    except Stuck:
        return False
    return all(result == pytest.approx(vectors.mean(axis=0), rel=1e-9)
               for result in results)


@quick
@given(places(), st.data())
def test_a_dropped_action_is_missed(place, data):
    plan, half, rank, actions = place
    actions.pop(data.draw(st.integers(0, len(actions) - 1)))
    # The mean of one contribution is that contribution.
    broken = changed(plan, half, rank, actions)
    assume(not gives_the_mean(broken))
    with pytest.raises(PlanError, match=r'rank \d+'):
        check(broken)


@quick
@given(places(), st.data())
def test_another_peer_is_found(place, data):
    plan, half, rank, actions = place
    index = data.draw(st.integers(0, len(actions) - 1))
    peer = data.draw(st.integers(-1, plan.ranks))
    assume(peer != actions[index].peer)
    actions[index] = actions[index]._replace(peer=peer)
    with pytest.raises(PlanError, match=r'rank \d+'):
        check(changed(plan, half, rank, actions))


@quick
@given(places(), st.data())
def test_other_blocks_are_found(place, data):
    plan, half, rank, actions = place
    index = data.draw(st.integers(0, len(actions) - 1))
    start = data.draw(st.integers(-1, plan.blocks))
    stop = data.draw(st.integers(-1, plan.blocks + 1))
    assume((start, stop) != actions[index][2:])
    actions[index] = actions[index]._replace(start=start, stop=stop)
    broken = changed(plan, half, rank, actions)
    # The mean of one contribution is that contribution, wherever it is.
    if actions[index][:2] == (EN, 1) and gives_the_mean(broken):
        return
    with pytest.raises(PlanError, match=r'rank \d+'):
        check(broken)


@quick
@given(places(), st.data())
def test_an_action_that_is_there_twice_is_found(place, data):
    plan, half, rank, actions = place
    twice = data.draw(st.sampled_from(actions))
    assume(twice[:2] != (EN, 1))        # changes nothing
    actions.insert(data.draw(st.integers(0, len(actions))), twice)
    with pytest.raises(PlanError, match=r'rank \d+'):
        check(changed(plan, half, rank, actions))


@quick
@given(places(), st.data())
def test_swapped_actions_that_pass_still_give_the_mean(place, data):
    plan, half, rank, actions = place
    one, other = (data.draw(st.integers(0, len(actions) - 1))
                  for _ in range(2))
    # The mean of one changes nothing, but must be asked for in time.
    assume((EN, 1) not in (actions[one][:2], actions[other][:2]))
    actions[one], actions[other] = actions[other], actions[one]
    swapped = changed(plan, half, rank, actions)
    try:
        check(swapped)
    except PlanError:
        assert not gives_the_mean(swapped)
    else:
        assert gives_the_mean(swapped)


def own(first, second, **changes):
    """A plan of two ranks and blocks, from (reduce, gather) of each."""
    return replace(Plan('own', 2, 2, 2, (first[0], second[0]),
                        (((0, 1),), ((1, 2),)), 2, (first[1], second[1])),
                   **changes)


#: Two ranks exchange blocks.
FIRST = ((Instruction(SP, 1, 1, 2), Instruction(RP, 1, 0, 1)),
         (Instruction(SR, 1, 0, 1), Instruction(RR, 1, 1, 2)))
SECOND = ((Instruction(SP, 0, 0, 1), Instruction(RP, 0, 1, 2)),
          (Instruction(SR, 0, 1, 2), Instruction(RR, 0, 0, 1)))


def test_the_model_of_the_broken_ones_is_sound():
    assert own(FIRST, SECOND, name='ring') == ring(2)
    assert check(own(FIRST, SECOND)).steps == 2


@pytest.mark.parametrize(('first', 'message'), [
    ((FIRST[0][1:], FIRST[1]),
     "rank 1: 'receive a partial sum and add it' (block 1, rank 0) is where "
     "rank 0 has 'send the result' (block 0, rank 1)"),
    ((FIRST[0][:1], FIRST[1]),
     "rank 0: 'encode the mean' (block 0, of 2 contributions) has 1 "
     'contributions to block 0'),
    ((FIRST[0], FIRST[1][1:]),
     "plan 'own' comes to a deadlock: rank 1 waits at 'receive the result' "
     '(block 0, rank 0)'),
    ((FIRST[0], FIRST[1][:1]),
     "rank 1: 'send the result' (block 1, rank 0) is not received by rank 0"),
    ((FIRST[0][::-1], FIRST[1]), None),
    ((FIRST[0], FIRST[1][::-1]), None),
    (((*FIRST[0], FIRST[0][0]), FIRST[1]),
     "rank 0: 'send a partial sum' (block 1, rank 1) comes when the rank has "
     'sent its sum of block 1'),
    ((FIRST[0], (FIRST[1][0]._replace(start=1, stop=2), FIRST[1][1])),
     "rank 0: 'send the result' (block 1, rank 1) comes before the rank has "
     'the result'),
    ((FIRST[0], (FIRST[1][0]._replace(stop=3), FIRST[1][1])),
     "rank 0: 'send the result' (blocks 0 to 2, rank 1) is not within 2 "
     'blocks'),
    ((FIRST[0], (FIRST[1][0]._replace(peer=0), FIRST[1][1])),
     "rank 0: 'send the result' (block 0, rank 0) is not with another one of "
     '2 ranks'),
    (((*FIRST[0], FIRST[1][0]), FIRST[1][1:]),
     "rank 0: 'send the result' (block 0, rank 1) does not belong into the "
     'reduce-scatter'),
    ((FIRST[0], (*FIRST[0], *FIRST[1])),
     "rank 0: 'send a partial sum' (block 1, rank 1) does not belong into "
     'the all-gather'),
    (((*FIRST[0], Instruction(EN, 0, 0, 1)), FIRST[1]),
     "rank 0: 'encode the mean' (block 0, of 0 contributions) is the mean of "
     'nothing'),
])
def test_what_is_wrong_is_said_with_rank_and_action(first, message):
    plan = own(first, SECOND)
    if message is None:
        check(plan)
        return
    assert error_of(plan) == message


def test_ranks_that_wait_for_each_other_are_named():
    assert error_of(own((FIRST[0][::-1], FIRST[1]),
                        (SECOND[0][::-1], SECOND[1]))) == (
        "plan 'own' comes to a deadlock: "
        "rank 0 waits at 'receive a partial sum and add it' (block 0, rank "
        "1), rank 1 waits at 'receive a partial sum and add it' (block 1, "
        'rank 0)')


def test_a_contribution_is_not_sent_to_two_ranks():
    plan = Plan('own', 3, 3, 1, (
        (Instruction(RP, 1, 0, 1), Instruction(RP, 2, 0, 1)),
        (Instruction(SP, 0, 0, 1), Instruction(SP, 2, 0, 1)),
        (Instruction(RP, 1, 0, 1), Instruction(SP, 0, 0, 1))),
        (((0, 1),), (), ()), 4, ((), (), ()))
    assert error_of(plan) == (
        "rank 1: 'send a partial sum' (block 0, rank 2) comes when the rank "
        'has sent its sum of block 0')


def test_a_sum_is_not_added_to_what_was_sent():
    """It would never reach the owner."""
    both = (Instruction(SP, 1, 0, 1), Instruction(RP, 1, 0, 1)), ()
    plan = own(both, tuple(tuple(action._replace(peer=0) for action in half)
                           for half in both))
    assert error_of(plan) == (
        "rank 1: 'receive a partial sum and add it' (block 0, rank 0) comes "
        'when the rank has sent its sum of block 0')


def test_who_has_no_contribution_has_nothing_to_send():
    plan = Plan('own', 2, 1, 1, ((Instruction(RP, 1, 0, 1),),
                                 (Instruction(SP, 0, 0, 1),)),
                (((0, 1),), ()), 1, ((), ()))
    with pytest.raises(PlanError, match="rank 1: 'send a partial sum' .* "
                                        'nothing of block 0'):
        check(plan)


def test_a_contribution_that_does_not_count_is_named():
    plan = Plan('own', 2, 2, 1, ((), ()), ((), ((0, 1),)), 1,
                ((Instruction(RR, 1, 0, 1),), (Instruction(SR, 0, 0, 1),)))
    assert error_of(plan) == (
        "rank 1: 'encode the mean' (block 0, of 1 contributions) has 0, not "
        "1/2, of rank 0's contribution to block 0 in its mean")


def test_groups_of_different_size_have_no_mean_of_means():
    """Ranks 0 and 1 are a group of two, rank 2 is alone."""
    plan = Plan('own', 3, 3, 1, (
        (Instruction(RP, 1, 0, 1), Instruction(
            EN, 2, 0, 1), Instruction(RP, 2, 0, 1)),
        (Instruction(SP, 0, 0, 1),), (Instruction(SP, 0, 0, 1),)),
        (((0, 1),), (), ()), 2, ((), (), ()))
    with pytest.raises(PlanError, match="rank 0: .* has 1/4, not 1/3, of rank "
                                        "0's contribution"):
        check(plan)


def test_a_mean_that_is_made_or_received_again_is_found():
    plan = replace(direct(2), owned=(((0, 1), (0, 1)), ((1, 2),)))
    with pytest.raises(PlanError, match='rank 0: .encode the mean. .* comes '
                                        'when the rank has the result'):
        check(plan)
    plan = aggregator(1, 1)
    plan = changed(changed(plan, 'gather', 0, plan.gather[0] * 2),
                   'gather', 1, plan.gather[1] * 2)
    with pytest.raises(PlanError, match='rank 0: .receive the result. .* '
                                        'result of block 0 already'):
        check(plan)


def test_a_worker_without_the_result_is_found():
    plan = aggregator(2, 1)
    broken = changed(changed(plan, 'gather', 0, []), 'gather', 2,
                     plan.gather[2][1:])
    assert error_of(broken) == ("rank 0: 'receive the result' (block 0) is "
                                 "missing, or its 'encode the mean'")


def test_blocks_in_one_message_are_in_one_state():
    """Else nobody could say in which form they travel."""
    plan = Plan('own', 2, 2, 2, (
        (Instruction(RP, 1, 0, 1), Instruction(SP, 1, 0, 2)),
        (Instruction(SP, 0, 0, 1), Instruction(RP, 0, 0, 2))),
        ((), ((0, 2),)), 2, ((), ()))
    with pytest.raises(PlanError, match=r'rank 0: .*blocks 0 to 1, rank 1\) '
                                        'has blocks that were added to'):
        check(plan)


@pytest.mark.parametrize(('changes', 'message'), [
    ({'reduce': ((),)}, "2 ranks but 'reduce' of 1"),
    ({'owned': ()}, "2 ranks but 'owned' of 0"),
    ({'gather': ((),) * 3}, "2 ranks but 'gather' of 3"),
    ({'workers': 3}, '3 workers among 2 ranks'),
    ({'workers': 0}, '0 workers among 2 ranks'),
])
def test_a_plan_has_a_list_for_every_rank(changes, message):
    with pytest.raises(PlanError, match=message):
        check(replace(ring(2), **changes))
