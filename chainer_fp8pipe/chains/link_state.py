"""What links keep in attributes from one forward pass to the next.

A recurrent layer keeps its hidden state.  A pipeline takes several
micro-batches forward before the first one's backward pass, and each goes on
from its own state; the gradient ends there, as after Chainer's
``unchain_backward``.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import chainer

from ..planning.calls import Source
from . import nested
from .contents import NotedContent, is_changed, noted, put_back
from .ghost import is_ghost, sources

_OWN = frozenset(('_params', '_persistent', '_children'))
_ABSENT: Any = object()
Links = Mapping[str, chainer.Link]
Attribute = tuple[str, str]     # path of a link, name


class saved:
    """A ``with`` block after which links are as they were before.

    Args:
        links: By path.
        only: The attributes to restore; None: all of them.

    Attributes:
        memo: See :func:`.noted`.
    """

    def __init__(self, links: Links,
                 only: Iterable[Attribute] | None = None) -> None:
        self._links = links
        self._only = None if only is None else set(only)

    def __enter__(self) -> saved:
        return self.note()

    def __exit__(self, *_: Any) -> None:
        self.put_back()

    def note(self) -> saved:
        """Notes the attributes as they are now."""
        self._before: dict[Attribute, Any] = {}
        self.memo: dict[int, NotedContent] = {}
        for path, name in self._names():
            link = self._links[path]
            value = vars(link).get(name, _ABSENT)
            self._before[path, name] = (
                value if name in link._params else noted(value, self.memo))
        return self

    def put_back(self) -> None:
        """Restores the attributes that were noted; may be repeated."""
        for path, name in self._present():
            if (path, name) not in self._before:
                del vars(self._links[path])[name]
        done: dict[int, Any] = {}
        for (path, name), before in self._before.items():
            own = vars(self._links[path])
            if before is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = put_back(before, done)

    def changed(self) -> frozenset[Attribute]:
        """The attributes that are not as they were."""
        return frozenset(
            (path, name) for path, name in self._present()
            if is_changed(self._before.get((path, name), _ABSENT),
                          vars(self._links[path])[name], set()))

    def _names(self) -> Iterable[Attribute]:
        return self._only if self._only is not None else [
            (path, name) for path, link in self._links.items()
            for name in vars(link) if name not in _OWN]

    def _present(self) -> list[Attribute]:
        return [(path, name) for path, name in self._names()
                if name in vars(self._links[path])]


def frozen(links: Links) -> dict[Attribute, Any]:
    """The attributes that a forward pass may set, as they are now."""
    return {(path, name): value for path, link in links.items()
            for name, value in vars(link).items()
            if name not in _OWN and name not in link._params
            and name not in link._persistent
            and not isinstance(value, chainer.Link)}


class Leaf(NamedTuple):
    """An array or variable in a link's attribute.

    Attributes:
        xp: ``numpy`` or ``cupy``.
        sources: The outputs of calls from which it is made; (): of none.
        stage: Number of the stage that keeps it.
    """

    shape: tuple[int, ...]
    dtype: Any
    xp: Any
    is_variable: bool
    sources: tuple[Source, ...]
    stage: int = 0


class Entry(NamedTuple):
    """An attribute that a forward pass has set.

    Attributes:
        link: Path of the link.
        name: Of the attribute.
        tree: See :func:`.nested.leaves`.
        leaves: The arrays and variables in the attribute.
    """

    link: str
    name: str
    tree: Any
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True)
class LinkState:
    """The ghosts that a forward pass leaves in attributes."""

    entries: tuple[Entry, ...] = ()

    @classmethod
    def found(cls, links: Links, begin: Mapping[Attribute, Any]) -> LinkState:
        """The attributes that were set to ghosts since the beginning."""
        entries = []
        for (path, name), value in frozen(links).items():
            if begin.get((path, name)) is value:
                continue
            leaves, tree = nested.leaves(value)
            arrays = list(map(nested.array_of, leaves))
            if not any(map(is_ghost, arrays)):
                continue
            entries.append(Entry(path, name, tree, tuple(
                Leaf(tuple(array.shape), array.dtype,
                     chainer.backend.get_array_module(array),
                     isinstance(leaf, chainer.Variable), sources(array))
                for leaf, array in zip(leaves, arrays, strict=True))))
        return cls(tuple(entries))

    def placed(self, stages: Callable[[Source], int]) -> LinkState:
        """The same with the stage of each leaf: that of its last source."""
        return LinkState(tuple(entry._replace(leaves=tuple(
            leaf._replace(stage=max(map(stages, leaf.sources), default=0))
            for leaf in entry.leaves)) for entry in self.entries))

    def sources(self) -> list[tuple[Source, ...]]:
        """The outputs of calls from which each leaf is made."""
        return [leaf.sources for entry in self.entries
                for leaf in entry.leaves]

    def put(self, links: Links, pin: Callable[..., Any]) -> None:
        """Sets the attributes to the arrays that ``pin`` returns.

        Args:
            links: By path.
            pin: Gets shape, dtype, stage and xp of a leaf, and the path of
                its link.
        """
        for entry in self.entries:
            values = []
            for leaf in entry.leaves:
                value = pin(leaf.shape, leaf.dtype, leaf.stage, leaf.xp,
                            entry.link)
                values.append(chainer.Variable(value, requires_grad=False)
                              if leaf.is_variable else value)
            setattr(links[entry.link], entry.name,
                    nested.rebuilt(entry.tree, values))

    def signature(self) -> Any:
        """Equal for states from which a model makes the same calls."""
        return tuple((entry.link, entry.name, repr(entry.tree), tuple(
            (leaf.shape, str(leaf.dtype), leaf.stage)
            for leaf in entry.leaves)) for entry in self.entries)
