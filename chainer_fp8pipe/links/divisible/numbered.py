"""A ``chainer.Sequential`` whose layers keep their numbers."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import chainer
from chainer import Link, Sequential

from ...pipeline.layer_block import as_tuple
from ...pipeline.layers import layer_name
from .layer_slots import LayerSlots
from .lazy import initialising


class Numbered(LayerSlots):
    """Runs, names and serialises layers by their numbers.

    Chainer's ``Sequential`` puts links in a wrong order from the third on
    (``sequential.py:281``), deletes by the links' ``name``, which another
    model may have changed, and yields a link that stands at two places
    twice; so what depends on these lists is written anew here.
    """

    # --- forward ------------------------------------------------------------

    def forward(self, *xs: Any) -> Any:
        """Runs the layers one after the other.

        A tuple (or list) that a layer returns becomes the arguments of the
        next.  Parameters whose shape is known only now get the values that
        they would get in a pipeline of any depth.

        Raises:
            RuntimeError: There are no layers, or they do not follow one
                another.
            TypeError: A layer returned None; the message names it.
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

    def children(self) -> Iterator[Link]:
        """Each link that is a layer, once."""
        yield from self._children

    def links(self, skipself: bool = False) -> Iterator[Link]:
        """Each link once."""
        for _, link in self.namedlinks(skipself):
            yield link

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
        for _, parameter in self.namedparams(include_uninit):
            yield parameter

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

        So what the whole model saved, any part can load, and what all parts
        saved makes up the whole.
        """
        for number, child in self._numbered_links():
            child.serialize(serializer[str(number)])

    def copyparams(self, link: Link, copy_persistent: bool = True) -> None:
        """Copies from the layers with the same numbers.

        Args:
            link: A model that has all links that this has: the whole, or
                the same part.
            copy_persistent: As in Chainer.

        Raises:
            ValueError: A layer is missing there.
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

    # --- what a model of numbered layers cannot have ------------------------

    def init_scope(self) -> NoReturn:
        """Nothing but layers can be in this model.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f'{type(self).__name__} holds layers only, as everything else '
            'could not be cut; append a link that holds what you wanted to '
            'register')

    def add_persistent(self, name: str, value: Any) -> NoReturn:
        """As :meth:`init_scope`."""
        self.init_scope()

    def register_persistent(self, name: str) -> NoReturn:
        """As :meth:`init_scope`."""
        self.init_scope()
