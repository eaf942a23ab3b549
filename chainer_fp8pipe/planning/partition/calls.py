"""The calls of a traced model: inputs, outputs, what they keep and cost."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Source(NamedTuple):
    """A value of a trace, named by the call that computed the value.

    Attributes:
        call: Number of the call.
        output: Index of the call's output, or the name of an attribute of
            the function (a dropout mask).
    """

    call: int
    output: int | str


class Value(NamedTuple):
    """An array that a call computed.

    Attributes:
        shape: Of the array.
        dtype: Of the array.
        wants: Whether backward needs the array's gradient.
    """

    shape: tuple[int, ...]
    dtype: Any
    wants: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(eq=False)
class Call:
    """One call of a function, or of a link that is run as a whole.

    Attributes:
        name: Of the function.
        link: Path of the link that made the call; '/' for the model itself.
        path: For each link around the call, from the model inwards, the
            number of the first call in that link.
        inputs: Values of other calls that the function reads.
        parameters: Paths of the parameters that the function reads.
        outputs: The function's outputs, by index or attribute name.
        forward: Seconds of a forward pass for the example.
        backward: Seconds of a backward pass.
        deferrable: Share of the backward pass that is for the gradients of
            weights alone, which can be computed later.
        kept: Bytes that the function itself keeps for backward.
        retained: Values of calls that the function keeps for backward.
        temporary: Most bytes that the function allocates while it runs.
        draws: Whether the function draws random numbers.
        whole: Paths of links whose calls must all be on one stage, because
            the link keeps running averages or is run as one call.
        pinned: For a value that a link has kept from an earlier batch, the
            stage that has the value.  None: an ordinary call.
        once: Whether the call's stage must not run forward twice, because a
            forward pass changes the link's state.
    """

    name: str
    link: str = '/'
    path: tuple[int, ...] = ()
    inputs: tuple[Source, ...] = ()
    parameters: tuple[str, ...] = ()
    outputs: dict[int | str, Value] = field(default_factory=dict)
    forward: float = 0.0
    backward: float = 0.0
    deferrable: float = 0.0
    kept: int = 0
    retained: tuple[Source, ...] = ()
    temporary: int = 0
    draws: bool = False
    whole: tuple[str, ...] = ()
    pinned: int | None = None
    once: bool = False

    @property
    def deferred(self) -> int:
        """Bytes of the outputs' gradients, if gradients of weights wait."""
        return (sum(value.nbytes for value in self.outputs.values())
                if self.deferrable else 0)


class Parameter(NamedTuple):
    """Shape and dtype of a parameter; shape None: only its link knows."""

    shape: tuple[int, ...] | None
    dtype: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the values; 0 where the shape is unknown."""
        return (0 if self.shape is None
                else math.prod(self.shape) * self.dtype.itemsize)


def total_seconds(calls: Sequence[Call]) -> float:
    """Seconds of the forward and backward passes of all calls."""
    return sum(call.forward + call.backward for call in calls)
