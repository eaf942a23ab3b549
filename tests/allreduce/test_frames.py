"""How a range is cut."""
from chainer_fp8pipe.allreduce.frames import Frames, piece_bounds

import numpy
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 100), st.integers(0, 1000), st.integers(1, 20))
def test_pieces_cover_a_range_evenly(start, length, parts):
    bounds = piece_bounds(start, start + length, parts)
    sizes = numpy.diff(bounds)
    assert (bounds[0], bounds[-1], len(sizes)) == (
        start, start + length, parts)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 100), st.integers(0, 500), st.integers(1, 9),
       st.integers(1, 600))
def test_every_element_is_in_one_frame_of_its_block(start, length, blocks,
                                                    frame):
    frames = Frames(start, start + length, blocks, frame)
    seen = []
    for block in range(blocks):
        parts = [frames.part(block, chunk) for chunk in range(frames.chunks)]
        assert all(0 <= part.stop - part.start <= frame for part in parts)
        inside = [element for part in parts
                  for element in range(part.start, part.stop)]
        assert inside == list(range(frames.bounds[block],
                                    frames.bounds[block + 1]))
        seen += inside
    assert seen == list(range(start, start + length))
    # The last chunk has something in it, or there is none.
    assert frames.chunks == -(-max(
        numpy.diff(frames.bounds), default=0) // frame)
