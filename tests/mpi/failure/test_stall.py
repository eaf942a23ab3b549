"""When a job stands still, and why: what is healthy though nothing moves."""
from chainer_fp8pipe.mpi.failure.stall import (
    ACTION,
    SECONDS,
    RankView,
    StallRule,
    StallSettings,
    State,
    find_cause,
    settings_of_environment,
)

import pytest

WAITS, WORKS, LEFT = State.WAITS, State.WORKS, State.LEFT
STOPPED, GONE, SILENT = State.STOPPED, State.GONE, State.SILENT


def view(rank, state, updates=5, **more):
    call = 'agree' if state is WAITS else ''
    return RankView(rank, f'rank {rank} of 2', state, updates=updates,
                    **{'call': call, **more})


def decisions(phases, settings=None, is_complete=True, usual=0.1):
    """When something is decided, and whether the job ends then.

    Each phase is its seconds and the ranks' views, or what makes the views
    of a second.
    """
    rule, now, found = StallRule(settings or StallSettings(), 8.0), 0.0, []
    for seconds, views in phases:
        for _ in range(seconds):
            now += 1.0
            made = views(now) if callable(views) else views
            decision = rule.look(now, made, usual, is_complete)
            if decision:
                found.append((now, decision.ends))
    return found


TRAIN = 1, [view(0, WORKS), view(1, WORKS)]
OUTSIDE = view(0, WAITS, outside=True)


def moving(now):
    return [view(0, WAITS, moves=str(now)), view(1, WAITS)]


@pytest.mark.parametrize(('phases', 'expected'), [
    # A rank cannot go on, and another waits for it.
    ([(100, [view(0, WAITS), view(1, STOPPED)])], [(32, True)]),
    ([(100, [view(0, WAITS), view(1, GONE)])], [(32, True)]),
    ([(100, [view(0, WAITS, waits_for=(1,)), view(1, LEFT)])], [(32, True)]),
    # It may not be that one that is waited for.
    ([(200, [view(0, WAITS), view(1, LEFT)])], [(122, True)]),
    # All wait for each other; one long message looks alike.
    ([(200, [view(0, WAITS), view(1, WAITS, call='bcast')])], [(122, True)]),
    ([(200, [view(0, WAITS), view(1, WAITS)])], [(122, True)]),
    # A rank evaluates, reads, compiles, sleeps, waits for a process.
    ([(2000, [view(0, WORKS), view(1, WAITS)])], [(302, False)]),
    # A debugger holds a rank, or a library its interpreter.
    ([(2000, [view(0, SILENT), view(1, WAITS)])], [(302, False)]),
    # All, or one that others wait for, wait for a spawned process.
    ([(2000, [OUTSIDE, view(1, WAITS, outside=True)])], [(302, False)]),
    ([(2000, [OUTSIDE, view(1, WAITS, waits_for=(0,))])], [(302, False)]),
    ([(2000, [OUTSIDE, view(1, LEFT)])], [(302, False)]),
    # Nobody waits: ranks have ended, evaluate, or are all stopped.
    ([(2000, [view(0, WORKS), view(1, LEFT)])], []),
    ([(2000, [view(0, WORKS), view(1, WORKS)])], []),
    ([(2000, [view(0, STOPPED), view(1, STOPPED)])], []),
    ([(2000, [view(0, WORKS), view(1, STOPPED)])], []),
    # All were stopped, and go on one after the other.
    ([(2000, [view(0, STOPPED), view(1, STOPPED)]),
      (20, [view(0, WAITS), view(1, STOPPED)]), (1, TRAIN[1])], []),
    # One was stopped, and goes on.
    ([(29, [view(0, WAITS), view(1, STOPPED)]),
      (200, [view(0, WAITS), view(1, WORKS)])], []),
    # After a long evaluation all take part in a long message.
    ([(290, [view(0, WORKS), view(1, WAITS)]),
      (100, [view(0, WAITS), view(1, WAITS)])], []),
    # Frames arrive, or a loop makes one wait after the other.
    ([(2000, moving)], []),
    # Updates go on, one in a minute.
    ([(2000, lambda now: [view(0, WAITS, 5 + now // 60),
                          view(1, WAITS, 5 + now // 60)])], []),
    # Before the first update a start may take its time.
    ([(2000, [view(0, WAITS, 0), view(1, STOPPED, 0)])], []),
    # An aggregator waits for orders.
    ([(2000, [view(0, WORKS), view(1, WAITS, 0)])], []),
    # What has been said of a stall is said again only of the next one.
    ([(400, [view(0, WORKS), view(1, WAITS)]),
      (400, [view(0, WORKS, 6), view(1, WAITS, 6)])],
     [(302, False), (702, False)]),
])
def test_a_job_stands_still_while_somebody_waits_and_nothing_changes(
        phases, expected):
    assert decisions([TRAIN, *phases]) == expected


def test_the_limit_is_that_of_slow_updates():
    assert decisions([TRAIN, (200, [view(0, WAITS), view(1, STOPPED)])],
                     usual=5.0) == [(102, True)]


def test_ranks_that_nobody_knows_may_be_waited_for():
    assert decisions([TRAIN, (2000, [view(0, WAITS), view(1, WAITS)])],
                     is_complete=False) == [(302, False)]


@pytest.mark.parametrize('busy', [WORKS, WAITS, STOPPED])
@pytest.mark.parametrize('ends', [True, False])
def test_seconds_that_were_given_hold_for_all(busy, ends):
    assert decisions([TRAIN, (200, [view(0, WAITS), view(1, busy)])],
                     StallSettings(5.0, ends)) == [(7, ends)]


def test_time_in_which_the_watchdog_did_not_run_does_not_count():
    rule = StallRule(StallSettings(5.0), 8.0)
    views = [view(0, WAITS), view(1, STOPPED)]
    times = [1.0, 2.0, 3600.0, 3601.0, 3602.0, 3604.0, 3606.0]
    assert [bool(rule.look(now, views, 0.1, True)) for now in times] == [
        False] * 6 + [True]


def test_what_is_silent_keeps_the_count_of_its_updates():
    """Or it would be taken for a rank that makes none."""
    rule = StallRule(StallSettings(5.0), 8.0)
    for now in range(20):
        decision = rule.look(now, [view(0, WAITS), view(
            1, WAITS, -1 if now else 3, call='bcast')], 0.1, True)
        if decision:
            break
    assert 'rank 1 of 2 has finished no update for 5 seconds (at least 3 ' in (
        decision.text)
    assert decision.text.endswith('ending all ranks with exit code 75\n')


# --- the cause ---------------------------------------------------------------

def waiting(rank, state=State.WAITS, waits_for=(), call='agree', updates=5):
    return RankView(rank, f'rank {rank} of 4', state, '', waits_for,
                    call if state is State.WAITS else '', updates)


@pytest.mark.parametrize(('views', 'ranks', 'is_certain', 'said'), [
    *(([waiting(0), waiting(1, state), waiting(2, waits_for=(1,))], (1,),
       True, f'rank 1 of 4 {state.value}')
      for state in (STOPPED, GONE, LEFT)),
    ([waiting(0, WORKS), waiting(1, STOPPED)], (1,), True, ''),
    # One that works on after others have left.
    ([waiting(0, WORKS), waiting(1, LEFT)], (0,), False, ''),
    # Of those that work, one for which another waits.
    ([waiting(0, WORKS), waiting(1, WORKS), waiting(2, waits_for=(1,))],
     (1,), False, ''),
    # The last of those that wait behind each other.
    ([waiting(0, waits_for=(1,)), waiting(1, waits_for=(2,)),
      waiting(2, call='MPI: bcast')], (2,), True, ''),
    # Another call than most, or another update.
    *(([waiting(0), waiting(1), other, waiting(3)], (2,), True,
       'the others:\n  rank 0 of 4')
      for other in (waiting(2, call='MPI: allreduce'),
                    waiting(2, updates=6))),
    ([waiting(0), waiting(1, call='MPI: bcast')], (0, 1), True,
     'different calls'),
    ([waiting(0), waiting(1)], (), True, 'in the same place'),
])
def test_the_cause_is_who_others_wait_for(views, ranks, is_certain, said):
    cause = find_cause(views)
    assert (cause.ranks, cause.is_certain) == (ranks, is_certain)
    assert said in cause.text


def test_of_many_ranks_some_are_shown():
    text = find_cause(waiting(rank, State.STOPPED) for rank in range(40)).text
    assert 'and 24 more' in text
    assert text.count('\n') == 18


# --- settings ----------------------------------------------------------------

@pytest.mark.parametrize(('given', 'settings'), [
    ({}, StallSettings()),
    ({SECONDS: ''}, StallSettings()),
    ({SECONDS: '0'}, StallSettings(0.0)),
    ({SECONDS: ' 2.5 ', ACTION: 'warn'}, StallSettings(2.5, ends=False)),
    ({ACTION: 'end'}, StallSettings()),
])
def test_settings_are_those_of_the_environment(monkeypatch, given, settings):
    monkeypatch.delenv(SECONDS, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert settings_of_environment() == settings


@pytest.mark.parametrize(('name', 'value'), [
    (SECONDS, 'soon'), (SECONDS, '-1'), (SECONDS, 'nan'), (SECONDS, 'inf'),
    (ACTION, 'restart')])
def test_a_value_that_is_not_allowed_is_an_error_that_names_it(
        monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f'{name} must be .*{value}'):
        settings_of_environment()
