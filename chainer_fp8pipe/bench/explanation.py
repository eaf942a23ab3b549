"""Why one way of averaging gradients is faster than another."""
from __future__ import annotations

from typing import NamedTuple


class Shares(NamedTuple):
    """What an update's exchange is spent on, on the slowest rank.

    Attributes:
        processor: Seconds of encoding, summing and decoding.
        latency: Seconds that an exchange of a few elements takes.
        nbytes: Bytes that a rank sends, of the rank that sends most.
    """

    processor: float
    latency: float
    nbytes: int

    def wire(self, seconds: float) -> float:
        """Seconds in which bytes move, and ranks wait for each other.

        Args:
            seconds: Of all.
        """
        return max(seconds - self.processor - self.latency, 0.0)

    def percent(self, seconds: float) -> tuple[int, int, int]:
        """Processor, wire and latency, out of 100."""
        processor = round(100 * min(self.processor / seconds, 1.0))
        latency = min(round(100 * min(self.latency / seconds, 1.0)),
                      100 - processor)
        return processor, 100 - processor - latency, latency


class Contender(NamedTuple):
    """A way of averaging, and its median time; ``shares`` None: MPI's."""

    name: str
    exact: bool
    seconds: float
    shares: Shares | None


def explain(contenders: list[Contender]) -> list[str]:
    """Lines that say why the fastest is, or that nothing compressed pays.

    Args:
        contenders: All of one size.
    """
    best = min(contenders, key=lambda one: one.seconds)
    others = [one for one in contenders if one.exact != best.exact]
    if not others:
        return []
    rival = min(others, key=lambda one: one.seconds)
    if best.exact:
        return ['warning: no compression pays here: '
                f'{_took(best)}, {_took(rival)}{_spent(rival)}']
    return [f'why: {_took(best)}{_spent(best)}; '
            f'without compression {_took(rival)}{_spent(rival)}']


def _took(one: Contender) -> str:
    return f'{one.name} takes {one.seconds * 1e3:.3g} ms'


def _spent(one: Contender) -> str:
    if one.shares is None:
        return ''
    return (f' ({one.shares.processor * 1e3:.3g} of the processor, '
            f'{one.shares.wire(one.seconds) * 1e3:.3g} of the wire, '
            f'{one.shares.latency * 1e3:.3g} of latency)')
