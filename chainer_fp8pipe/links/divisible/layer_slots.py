"""A ``chainer.Sequential`` whose layers keep the numbers of the whole model.

Chainer's own puts links in a wrong order from the third on
(``sequential.py:281``), deletes by the links' ``name``, which another model
may have changed, and yields a link that stands at two places twice; so what
depends on these lists is written anew here.
"""
from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import chainer
from chainer import Link, Sequential

from ...pipeline.layers import LayerError, as_tuple, layer_name
from .lazy import Lazy, initialising


class LayerRange(NamedTuple):
    """Which layers of the whole model a part has; ends are exclusive."""

    total: int                                  # layers of the whole model
    bounds: tuple[tuple[int, int], ...]         # of each run of layers
    rows: tuple[Any, ...]                       # of the whole model's table
    #: Start and end of each chunk of the whole model, in order; None if the
    #: part was cut by hand.
    layout: tuple[tuple[int, int], ...] | None = None
    stage: int = 0                              # of this rank
    stages: tuple[str, ...] = ()                # names in tables


class LayerSlots(Sequential):
    """Holds layers by their numbers, builds lazy ones, runs and names them.

    A layer's number is its index in the whole model, functions included.
    """

    _slots: list[Any]       # layers, or lazies not built yet
    _seed: int
    _part: LayerRange | None    # None: this is the whole model
    _others: dict[int, Any]     # layers of other parts, without values
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
        self._others = {}
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
        """Number and layer of all that is here; builds nothing."""
        numbers = itertools.chain(*itertools.starmap(range, self.bounds))
        return list(zip(numbers, self._slots, strict=True))

    def all_slots(self) -> list[tuple[int, Any]]:
        """Number and layer of the whole model; builds nothing.

        Links that are elsewhere have parameters without values.
        """
        return sorted({**self._others,
                       **dict(self.numbered_slots())}.items(),
                      key=lambda pair: pair[0])

    def _must_be_whole(self) -> None:
        if self._part:
            raise ValueError(
                f'{self!r} is a part, whose layers keep the numbers of the '
                'whole model; change the whole and divide it again, or make '
                'a new model of these layers: Divisible(*part)')

    def _name_links(self) -> None:
        """Gives links their numbers as names; nothing here reads them."""
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

    def _numbered_links(self) -> list[tuple[int, Link]]:
        """Each link that is a layer, once, with its first number."""
        first: dict[int, tuple[int, Link]] = {}
        for number, layer in self._numbered_layers():
            if isinstance(layer, Link):
                first.setdefault(id(layer), (number, layer))
        return list(first.values())

    # Chainer's own methods work on these two.

    @property
    def _layers(self) -> list[Any]:
        self._numbered_layers()
        return self._slots

    @property
    def _children(self) -> list[Link]:
        return [link for _, link in self._numbered_links()]

    # --- forward ------------------------------------------------------------

    def forward(self, *xs: Any) -> Any:
        """Runs the layers, which must follow one another.

        A tuple (or list) that a layer returns becomes the arguments of the
        next.  Parameters whose shape is known only now get the values that
        they would get in a pipeline of any depth.
        """
        if not self._slots:
            raise RuntimeError(f'{self!r} does not have any layer')
        ends = [end for _, end in self.bounds[:-1]]
        if ends != [start for start, _ in self.bounds[1:]]:
            raise RuntimeError(f'{self!r} cannot be run at a stretch, as '
                               'layers are missing between; run its pieces')
        value: Any = xs
        for number, layer in self._numbered_layers():
            value = self._call(number, layer, as_tuple(value))
            if value is None:
                raise TypeError(f'{layer_name(number, layer)} returned None; '
                                'a layer returns a variable, an array, or a '
                                'tuple of these')
        self._initialised = True
        return value

    def _call(self, number: int, layer: Any, xs: tuple) -> Any:
        if self._initialised or not isinstance(layer, Link) or all(
                parameter.array is not None for parameter in layer.params()):
            return layer(*xs)
        with initialising(self._seed, number, layer.xp):
            return layer(*xs)

    # --- traversal ----------------------------------------------------------

    def links(self, skipself: bool = False) -> Iterator[Link]:
        """Each link once."""
        return (link for _, link in self.namedlinks(skipself))

    def namedlinks(self, skipself: bool = False
                   ) -> Iterator[tuple[str, Link]]:
        """Each link once, with the first of its paths (``'/7/conv'``)."""
        seen: set[int] = set()
        if not skipself:
            yield '/', self
        for number, child in self._numbered_links():
            for path, link in child.namedlinks():
                if id(link) not in seen:
                    seen.add(id(link))
                    yield f'/{number}{path}'.rstrip('/'), link

    def params(self, include_uninit: bool = True
               ) -> Iterator[chainer.Parameter]:
        """Each parameter once."""
        return (one for _, one in self.namedparams(include_uninit))

    def namedparams(self, include_uninit: bool = True
                    ) -> Iterator[tuple[str, chainer.Parameter]]:
        """Each parameter once, with the first of its paths (``'/7/W'``)."""
        seen: set[int] = set()
        for number, child in self._numbered_links():
            for path, parameter in child.namedparams(include_uninit):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f'/{number}{path}', parameter

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Saves or loads under the numbers of the whole model (``'7/W'``).

        Any part can load what the whole model saved, and the files of all
        parts together make up that of the whole.
        """
        for number, child in self._numbered_links():
            child.serialize(serializer[str(number)])

    def copyparams(self, link: Link, copy_persistent: bool = True) -> None:
        """Copies from the layers of ``link`` with the same numbers.

        Raises:
            ValueError: ``link`` lacks one of this model's links.
        """
        for mine, other in self._paired(link):
            mine.copyparams(other, copy_persistent)

    def addgrads(self, link: Link) -> None:
        """Adds gradients of the layers with the same numbers."""
        for mine, other in self._paired(link):
            mine.addgrads(other)

    def _paired(self, other: Any) -> Iterator[tuple[Link, Link]]:
        if not isinstance(other, Sequential):
            raise ValueError(f'{self!r} has nothing in common with a '
                             f'{type(other).__name__}')
        theirs = dict(other._numbered_layers() if isinstance(other, LayerSlots)
                      else enumerate(other))
        for number, child in self._numbered_links():
            if not isinstance(theirs.get(number), Link):
                raise ValueError(f'{layer_name(number, child)} is not in '
                                 f'{type(other).__name__}')
            yield child, theirs[number]

    def init_scope(self, *_: Any) -> NoReturn:
        """Raises TypeError: a model holds nothing but layers."""
        raise TypeError(
            f'{type(self).__name__} holds layers only, as everything else '
            'could not be cut; append a link that holds what you wanted to '
            'register')

    add_persistent = register_persistent = init_scope


@contextlib.contextmanager
def _inside(name: str) -> Iterator[None]:
    """Adds the outer layer's name to an error about a layer inside."""
    try:
        yield
    except LayerError as error:
        raise LayerError(f'{error} (inside of {name})') from error
