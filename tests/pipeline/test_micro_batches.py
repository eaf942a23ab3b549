from chainer_fp8pipe.pipeline.schedules import bounds, recomputed

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 100), st.integers(1, 40))
def test_parts_are_those_of_numpy(samples, parts):
    expected = [len(part) for part
                in np.array_split(np.arange(samples), parts)]
    found = bounds(samples, parts)
    assert [end - start for start, end in found] == expected
    assert [start for start, _ in found] == [
        sum(expected[:number]) for number in range(parts)]


@pytest.mark.parametrize(('given', 'chunks'), [
    (True, {0, 1, 2}), (False, set()), ('every stage', {0, 1, 2}),
    ('every stage but the last', {0, 1}), ('no stage', set()),
    ((True, False, True), {0, 2}), ((False, False, False), set())])
def test_what_is_recomputed(given, chunks):
    assert recomputed(given, 2) == chunks


def test_an_unknown_choice_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match="'every stage but the last', not"):
        recomputed('sometimes', 2)


def test_a_tuple_says_of_each_chunk_and_of_no_others():
    for short in ((), (True,), (True, False)):
        with pytest.raises(ValueError, match='recompute must be True, False'):
            recomputed(short, 2)
