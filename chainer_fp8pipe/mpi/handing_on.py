"""Into what frames ranks cut an array that each hands on to the next one."""
from __future__ import annotations

#: Bytes of the smallest frame; smaller arrays are not cut.  The planner
#: simulates frames of this size when stages hand a batch on.
LEAST_FRAME_BYTES = 1 << 16
_MOST_FRAMES = 256


def frame_bytes(size: int) -> int:
    """Bytes of each frame but the last one of an array of ``size`` bytes."""
    return max(LEAST_FRAME_BYTES, -(-size // _MOST_FRAMES))
