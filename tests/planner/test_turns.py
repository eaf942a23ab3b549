"""Ratios do not depend on when the machine was slow."""
from chainer_fp8pipe.planner.turns import at_one_pace, in_turns

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

PACES = st.lists(st.floats(.5, 2), min_size=3, max_size=9)


@given(PACES, st.lists(st.floats(.1, 10), min_size=1, max_size=4))
def test_what_goes_as_the_pace_goes_is_the_same_in_all_rounds(paces, others):
    """Both passes beside a round were as slow as its own work."""
    reference = [[pace * .3, pace * .7] for pace in paces]
    between = [(one + two) / 2 for one, two in zip(
        paces, paces[1:], strict=False)]
    first, *found = at_one_pace([reference, *(
        [[pace * seconds] for pace in between] for seconds in others)])
    numpy.testing.assert_array_equal(first, reference)
    usual = numpy.median(paces)
    for seconds, of in zip(others, found, strict=True):
        assert of.shape == (len(paces) - 1, 1)
        numpy.testing.assert_allclose(of, seconds * usual)


def test_all_kinds_take_turns():
    done = []

    def kind(name, values):
        def work():
            done.append(name)
            return [1.0] * values
        return work
    one, two, three = in_turns([kind('a', 1), kind('b', 2), kind('c', 3)])
    assert ''.join(done) == 'abc' * (len(done) // 3) + 'a'
    assert len(one) == len(two) + 1 == len(three) + 1 == len(done) // 3
    assert two.shape[1] == 2
    numpy.testing.assert_array_equal(three, 1.0)


def test_work_that_fails_ends_all():
    with pytest.raises(ZeroDivisionError):
        in_turns([lambda: [1 / 0]])
