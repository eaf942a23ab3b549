"""What a model holds: layers, built or not, and their numbers."""
from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from chainer import Link, Sequential

from ...pipeline.layers import LayerError, layer_name
from .lazy import Lazy, initialising


class LayerRange(NamedTuple):
    """Which layers of which model a part has.

    Attributes:
        total: Number of layers of the whole model.
        bounds: Start and end (exclusive) of each run of layers.
        rows: What the table says of each layer of the whole model.
        layout: Start and end of each chunk of the whole model, in order;
            None if it was cut by hand.
        stage: This rank's stage.
        stages: What each stage is called.
    """

    total: int
    bounds: tuple[tuple[int, int], ...]
    rows: tuple[Any, ...]
    layout: tuple[tuple[int, int], ...] | None = None
    stage: int = 0
    stages: tuple[str, ...] = ()


class LayerSlots(Sequential):
    """Holds layers by their numbers, and builds lazy ones when asked.

    A layer's number is its index in the whole model, functions included; a
    part of a model keeps the numbers of the whole.
    """

    _slots: list[Any]       # layers, or lazies not built yet
    _seed: int
    _part: LayerRange | None      # None: this is the whole model
    _complete: bool         # all lazies are built
    _initialised: bool      # no parameter waits for its shape

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Here and not in __init__: a part is made without calling a user's
        # __init__, and that may append before it calls ours, or never call
        # it (as in the paper's Program 2).
        self = super().__new__(cls)
        Link.__init__(self)
        self._slots = []
        self._seed = 0
        self._part = None
        self._complete = self._initialised = False
        return self

    # --- numbers ------------------------------------------------------------

    @property
    def seed(self) -> int:
        """Seed of the initial values of lazy layers."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = operator.index(seed)

    @property
    def total(self) -> int:
        """Number of layers of the whole model."""
        return self._part.total if self._part else len(self._slots)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Start and end (exclusive) of each run of layers that are here."""
        return self._part.bounds if self._part else ((0, len(self._slots)),)

    def numbered_slots(self) -> list[tuple[int, Any]]:
        """Number and layer of all that is here; nothing is built."""
        numbers = [number for start, end in self.bounds
                   for number in range(start, end)]
        return list(zip(numbers, self._slots, strict=True))

    def _numbered_links(self) -> list[tuple[int, Link]]:
        """Each link that is a layer, once, with its first number."""
        first: dict[int, tuple[int, Link]] = {}
        for number, layer in self._numbered_layers():
            if isinstance(layer, Link):
                first.setdefault(id(layer), (number, layer))
        return list(first.values())

    def _must_be_whole(self) -> None:
        if self._part:
            raise ValueError(
                f'{self!r} is a part, whose layers keep the numbers of the '
                'whole model; change the whole and divide it again, or make '
                'a new model of these layers: Divisible(*part)')

    def _name_links(self) -> None:
        """Lets links know their numbers; nothing here depends on it."""
        # Backwards, so that a link at two places has its first number.
        for number, layer in reversed(self.numbered_slots()):
            if isinstance(layer, Link):
                layer.name = str(number)

    # --- building -----------------------------------------------------------

    def _build(self, position: int, number: int) -> Any:
        layer = self._slots[position]
        if isinstance(layer, Lazy):
            layer = self._slots[position] = layer.build(self._seed, number)
        if isinstance(layer, Link):
            # Lazies of a model inside of this layer are built now, so that
            # they draw what this layer draws, not what their own model does.
            with initialising(self._seed, number), \
                    _inside(layer_name(number, layer)):
                for _ in layer.links():
                    pass
        return layer

    def _numbered_layers(self) -> list[tuple[int, Any]]:
        """Number and layer of all that is here, built."""
        if not self._complete:
            for position, (number, _) in enumerate(self.numbered_slots()):
                self._build(position, number)
            self._complete = True
            self._name_links()
        return self.numbered_slots()

    @property
    def _layers(self) -> list[Any]:
        """What Chainer's own methods work on."""
        self._numbered_layers()
        return self._slots

    @property
    def _children(self) -> list[Link]:
        """As ``_layers``."""
        return [link for _, link in self._numbered_links()]


@contextlib.contextmanager
def _inside(name: str) -> Iterator[None]:
    """Says which layer of this model a layer that fails is in."""
    try:
        yield
    except LayerError as error:
        raise LayerError(f'{error} (inside of {name})') from error
