"""Which share of a tensor's elements was clipped since the last look."""
from __future__ import annotations


class ClippedShares:
    """Makes shares of a codec's counters, which only grow.

    Attributes:
        last: By tensor, the clipped and the encoded elements at the last
            look.
    """

    def __init__(self) -> None:
        self.last: dict[str, tuple[float, float]] = {}

    def since_last(self, name: str, clipped: float, encoded: float
                   ) -> float | None:
        """The share since the last look; None: nothing was encoded."""
        before, seen = self.last.get(name, (0, 0))
        self.last[name] = clipped, encoded
        return (clipped - before) / (encoded - seen) if encoded > seen else (
            None)
