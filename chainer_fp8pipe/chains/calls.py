"""The calls of a recorded model: what they cost, and the chunk each is on."""
# A plan serves programs with other sequence lengths, in evaluation and with
# other control flow, so a cut cannot be the number of a call.  Instead, the
# model's parameters are grouped by link and numbered in the order of first
# use.  The *place* of a call is the largest number among the parameters that
# the call, or any call it depends on, reads; the *depth* counts the calls on
# the longest path to it from the first call at that place.  The position
# (place, depth) of a call is greater than the positions of its inputs.  So
# cuts at positions give each call of any program a chunk that is not before
# the chunks of its inputs, and a recurrent network is cut between layers, not
# between time steps.
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Source(NamedTuple):
    """A value of a program, named by the call that computed the value."""

    call: int           # its number
    output: int | str   # index, or an attribute of the function (a mask)


class Value(NamedTuple):
    """An array that a call computes, or a parameter."""

    shape: tuple[int, ...] | None   # None: of a parameter that has none yet
    dtype: Any
    wants: bool = False     # backward needs the gradient of what is computed

    @property
    def size(self) -> int:
        """Elements of the array; 0 where the shape is unknown."""
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array; 0 where the shape is unknown."""
        return self.size * self.dtype.itemsize


@dataclass(eq=False)
class Call:
    """One call of a function, or of a link that is run as a whole.

    Without its values: all programs that make it share this.
    """

    name: str           # of the function
    link: str = '/'     # path of the link that made the call
    #: For each link around the call, from the model inwards, the number of
    #: the first call in that link.
    path: tuple[int, ...] = ()
    inputs: tuple[Source, ...] = ()     # values of other calls
    parameters: tuple[str, ...] = ()    # their paths
    outputs: dict[int | str, Value] = field(default_factory=dict)
    forward: float = 0.0        # seconds
    backward: float = 0.0
    deferrable: bool = False    # gradients of weights can be put off
    kept: int = 0               # bytes that it keeps itself for backward
    retained: tuple[Source, ...] = ()   # values that it keeps for backward
    temporary: int = 0          # most bytes that it allocates while it runs
    draws: bool = False         # random numbers
    #: Paths of links whose calls must all be on one chunk, because the link
    #: keeps running averages or is run as one call.
    whole: tuple[str, ...] = ()
    #: Of a value that a link has kept from an earlier batch: the chunk that
    #: has it.
    pinned: int | None = None
    #: Placeholders like the outputs, of no program.
    forms: dict[int | str, Any] = field(default_factory=dict)
    #: Numbers of the inputs and outputs that are kept for backward.
    kept_inputs: tuple[int, ...] = ()
    kept_outputs: tuple[int, ...] = ()
    #: By output in the memory of an input, the input's number.
    views: dict[int, int] = field(default_factory=dict)
    writes: tuple[str, ...] = ()    # attributes with arrays that it changes
    inner: tuple[str, ...] = ()     # parameters that are read inside
    form: Any = None                #: See :attr:`.ArrayCall.result`.
    #: Labels that losses leave out of their means, and the index of the input
    #: that has the labels (None if unknown).
    ignored: tuple[tuple[int, int | None], ...] = ()
    alone: bool = False     # it follows from the batch, and is made by all
    config: Mapping[str, Any] = field(default_factory=dict)  # that has changed
    reads: tuple[str, ...] = ()     # links whose persistent arrays it uses
    numbers: tuple[str, ...] = ()   # attributes that are numbers,
    hidden: tuple[str, ...] = ()    # that have placeholders inside,
    copied: tuple[str, ...] = ()    # to which Python may write
    real: tuple[int, ...] = ()      # indexes of such arguments


#: Groups of paths of parameters, in the order of first use.
Order = tuple[tuple[str, ...], ...]


class Position(NamedTuple):
    """Where along the model a call is."""

    place: int      # index of a group in the order of parameters
    depth: int      # calls at this place before it, on the longest path


def order_of(calls: Sequence[Call], names: Sequence[str] = ()) -> Order:
    """The groups of parameters that the calls use.

    A link's parameters form one group, whenever in the link they are first
    used: a recurrent layer uses some only from its second step on.  One that
    no call uses follows that before it in ``names``, paths of all parameters.
    """
    first: dict[str, tuple[int, ...]] = {}
    for number, call in enumerate(calls):
        for name in call.parameters:
            first.setdefault(name, (*call.path, number))
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, key in first.items():
        groups.setdefault(key, []).append(name)
    found = [sorted(groups[key]) for key in sorted(groups)]
    group_of = {name: group for group in found for name in group}
    for before, name in zip(['', *names], names, strict=False):
        if name not in group_of:
            number = next((index for index, group in enumerate(found)
                           if before in group), -1)
            found.insert(number + 1, [name])
            group_of[name] = found[number + 1]
    return tuple(map(tuple, found))


def positions(calls: Sequence[Call], order: Order) -> list[Position]:
    """The position of every call.

    Parameters that the order lacks come last.
    """
    place_of = {name: place for place, group in enumerate(order)
                for name in group}
    found: list[Position] = []
    for call in calls:
        known = [found[source.call] for source in call.inputs]
        place = max([*(place_of.get(name, len(order))
                       for name in call.parameters),
                     *(position.place for position in known)], default=0)
        found.append(Position(place, max(
            (position.depth + 1 for position in known
             if position.place == place), default=0)))
    return found
