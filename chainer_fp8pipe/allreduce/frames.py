"""The cut of a range of the fused vector into blocks, and into frames."""
from __future__ import annotations

from .plan import Instruction


class Frames:
    """Blocks of nearly equal size, each cut into frames.

    Chunk c is frame c of every block.  A block's last frame may be shorter,
    or empty, where it is shorter than another block.

    Args:
        start: First element of the range.
        stop: Last element plus one.
        blocks: How many blocks there are.
        frame: Elements of a frame.

    Attributes:
        bounds: Where the blocks begin and end, see :func:`piece_bounds`.
        chunks: How many chunks there are.
        frame: Elements of a frame; no more than the longest block has.
    """

    def __init__(self, start: int, stop: int, blocks: int,
                 frame: int) -> None:
        self.bounds = piece_bounds(start, stop, blocks)
        longest = -(-(stop - start) // blocks)
        self.chunks = -(-longest // frame)
        self.frame = min(frame, longest)

    def part(self, block: int, chunk: int) -> slice:
        """Where frame ``chunk`` of ``block`` lies in the fused vector."""
        start, stop = self.bounds[block], self.bounds[block + 1]
        start = min(start + chunk * self.frame, stop)
        return slice(start, min(start + self.frame, stop))

    def owned(self, action: Instruction) -> tuple[int, int]:
        """The range of the fused vector that an action's blocks are."""
        return self.bounds[action.start], self.bounds[action.stop]


def piece_bounds(start: int, stop: int, parts: int) -> list[int]:
    """Where ``[start, stop)`` is cut into ``parts`` pieces, ends included.

    Sizes differ by one element at most.
    """
    return [start + (stop - start) * part // parts
            for part in range(parts + 1)]
