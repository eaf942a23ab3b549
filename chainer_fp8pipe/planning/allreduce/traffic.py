"""What a plan sends, counted."""
from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple


class MessageForm(enum.Enum):
    """What a message of an all-reduce carries."""

    CONTRIBUTION = 'contribution'   # of one rank, or of a group, encoded
    PARTIAL = 'partial sum'         # after something was added
    RESULT = 'result'


class Traffic(NamedTuple):
    """Messages, and their elements as a share of the whole vector."""

    messages: int
    elements: Fraction

    def and_(self, other: Traffic) -> Traffic:
        """The messages and elements of both together."""
        return Traffic(self.messages + other.messages,
                       self.elements + other.elements)


NO_TRAFFIC = Traffic(0, Fraction(0))


@dataclass(frozen=True)
class TrafficReport:
    """What a plan sends.

    Attributes:
        pairs: By (source, target), for pairs with messages, then by form.
        steps: Messages in the longest chain in which each one waits for the
            one before: 2 for ``direct``, 2 (P - 1) for a ring.
    """

    pairs: Mapping[tuple[int, int], Mapping[MessageForm, Traffic]]
    steps: int

    def sent(self, rank: int) -> dict[MessageForm, Traffic]:
        """What leaves ``rank``, by form."""
        return _by_form(forms for (source, _), forms in self.pairs.items()
                        if source == rank)

    def received(self, rank: int) -> dict[MessageForm, Traffic]:
        """What reaches ``rank``, by form."""
        return _by_form(forms for (_, target), forms in self.pairs.items()
                        if target == rank)


def _by_form(several: Iterable[Mapping[MessageForm, Traffic]]
             ) -> dict[MessageForm, Traffic]:
    total: dict[MessageForm, Traffic] = {}
    for forms in several:
        for form, traffic in forms.items():
            total[form] = total.get(form, NO_TRAFFIC).and_(traffic)
    return total
