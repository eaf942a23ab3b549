"""Texts in frames."""
from chainer_fp8pipe.channel.headers import (
    DESCRIPTION,
    FAILURE,
    FRAME,
    Assembly,
    frames,
)

from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.tuples(st.sampled_from([DESCRIPTION, FAILURE]),
                          st.binary(max_size=20) | st.binary(
                              min_size=FRAME - 10, max_size=4 * FRAME)),
                max_size=4),
       st.integers(0, FRAME))
def test_texts_survive_and_no_frame_has_the_length_of_arrays(texts, unlike):
    assembly, found = Assembly(), []
    for kind, text in texts:
        for frame in frames(kind, text, unlike):
            assert len(frame) <= FRAME
            assert len(frame) != unlike
            whole = assembly.add(frame)
            if whole:
                found.append(whole)
    assert found == texts


def test_the_next_length_is_not_the_arrays_either():
    (frame,) = frames(DESCRIPTION, b'abc', -1)
    (longer,) = frames(DESCRIPTION, b'abc', len(frame))
    assert len(longer) == len(frame) + 1
