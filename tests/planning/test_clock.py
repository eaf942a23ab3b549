"""Functions are called in the order of their times and tickets."""
from chainer_fp8pipe.planning.clock import Clock

from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(0, 5)))
def test_functions_are_called_by_time_and_then_as_they_were_asked_for(times):
    clock, calls = Clock(), []
    for number, time in enumerate(times):
        clock.at(time, lambda *call: calls.append((clock.now, *call)), time,
                 number)
    clock.run()
    assert calls == [(time, time, number) for time, number in sorted(
        (time, number) for number, time in enumerate(times))]


def test_a_function_may_ask_for_others_at_the_same_time():
    clock, calls = Clock(), []
    clock.at(1.0, lambda: clock.at(1.0, calls.append, 'later'))
    clock.at(1.0, calls.append, 'first')
    clock.run()
    assert (calls, clock.now) == (['first', 'later'], 1.0)


def test_a_ticket_keeps_a_place_before_those_who_came_later():
    clock, calls = Clock(), []
    ticket = clock.ticket()
    clock.at(1.0, calls.append, 'other')
    assert clock.at_ticket(1.0, ticket, calls.append, 'ticket')
    clock.run()
    assert calls == ['ticket', 'other']


def test_a_ticket_whose_place_is_past_is_refused():
    clock, calls = Clock(), []
    ticket = clock.ticket()
    clock.at(1.0, lambda: calls.append(
        clock.at_ticket(1.0, ticket, calls.append, 'too late')))
    clock.run()
    assert calls == [False]
