"""Frames are neither too small nor too many."""
from chainer_fp8pipe.mpi.handing_on import LEAST_FRAME_BYTES, frame_bytes

import pytest


@pytest.mark.parametrize(('size', 'frames'), [
    (1, 1), (LEAST_FRAME_BYTES, 1), (LEAST_FRAME_BYTES + 1, 2),
    (255 * LEAST_FRAME_BYTES + 1, 256), (256 * LEAST_FRAME_BYTES + 1, 256),
    (10 ** 9, 256)])
def test_an_array_has_as_many_frames_as_it_fills_but_no_more_than_256(
        size, frames):
    assert -(-size // frame_bytes(size)) == frames
