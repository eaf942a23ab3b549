"""The form of a call: calls with equal forms are written down alike."""
# A form says all of a call but the values of arrays.  A call's key is its
# form, what it reads, its number, and the links around it.
#
# Of Chainer's functions, numbers that are no integers, and integers in arrays
# (each call of an EmbedID gets other words), decide about no shape, and are
# left out; of a user's functions they may be an index.  Functions are the same
# with the same things around them, other objects if they are equal.  A call
# with something that has no hash is like no other one.
from __future__ import annotations

import hashlib
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import chainer
import numpy

from . import nested
from .calls import Source
from .measure import CHAINERS
from .placeholder import Ahead, is_placeholder, looked_at, user_line
from .program import LOCAL, Program
from .whole_call import ArrayCall, WholeCall

_SIMPLE = frozenset((int, bool, str, type(None), type))
#: Attributes with arrays whose values decide about the output's shape.
_DECIDING = frozenset(('indices', 'pad_width', 'reps', 'shape', 'axes',
                       'slices'))


#: What is in a value, by its type.
_INSIDE: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: lambda value: value.items(),
    slice: lambda value: (value.start, value.stop, value.step),
    types.CellType: lambda value: (
        () if value == types.CellType() else (value.cell_contents,)),
    types.MethodType: lambda value: (value.__self__, value.__func__),
    types.FunctionType: lambda value: (
        value.__code__, value.__defaults__, value.__kwdefaults__,
        *(value.__closure__ or ()))}


class Forms:
    """Finds the forms of the calls of a program that is being recorded."""

    def __init__(self, program: Program) -> None:
        self._program, self._names = program, program.names
        #: Chainer's configuration of this thread as recording began.
        self.config = dict(vars(LOCAL))
        #: The links around the call, and what the last call reads.
        self.stack: list[chainer.Link] = []
        self.read: list[Source | str] = []
        #: Paths of links with persistent arrays, by these arrays' ids.
        self.owners: dict[int, str] = {}
        self._note_owners(self._names.links.values())
        # Whether no other call has this one's form; and the functions around
        # the value that is being described.
        self._is_unlike = False
        self._around: set[int] = set()

    def _note_owners(self, links: Iterable[chainer.Link]) -> None:
        for link in links:
            path = link._persistent and self._names.of(link)
            if path:
                self.owners.update((id(value), path)
                                   for value in persistent_in(link))

    def owner_of(self, array: Any) -> str | None:
        """The link with a persistent array, which this one may be a view of.
        """
        self._note_owners(self.stack)       # forward may have made it
        return self.owners.get(id(array)) or self.owners.get(
            id(getattr(array, 'base', None)))

    def of(self, function: Any, inputs: tuple) -> tuple | None:
        """The key of a call, which begins with its form.

        It is None where no other call can be like this one.
        """
        kind: Any = type(function)
        program, path_of = self._program, self._names.of
        self.read, self._is_unlike = [], False
        self._around.clear()
        exact, read = not kind.__module__.startswith('chainer.'), self.read
        found: list[Any] = [kind]
        for x in inputs:
            if type(x) is Ahead and (array := x._data[0]).program is program:
                source: Any = array.source
            elif (source := path_of(x)) is None or (array := x._data[0]
                                                    ) is None:
                found.append(self._about(x, exact and not (
                    kind is WholeCall or kind is ArrayCall
                    and is_placeholder(x))))
                continue
            read.append(source)
            found += array.shape, array.dtype, x._requires_grad
        for name, value in function.__dict__.items():
            if type(value) in _SIMPLE:
                found += name, type(value), value
            elif name not in CHAINERS:
                found += name, self._about(value, exact or name in _DECIDING)
        if vars(LOCAL) != self.config:
            found.append(repr(vars(LOCAL)))
        return None if self._is_unlike else (
            tuple(found), tuple(read), len(program.calls),
            *map(id, self.stack))

    def _about(self, value: Any, exact: bool) -> Any:
        """Describes a value; ``exact``: with the numbers in its arrays."""
        kind: Any = type(value)
        if kind in _SIMPLE:
            return kind, value
        if kind is tuple and _SIMPLE.issuperset(kinds := [*map(type, value)]):
            return kind, *kinds, value
        if isinstance(value, nested.LEAVES):
            return self._about_array(value, exact)
        if kind is types.FunctionType:
            if id(value) in self._around:
                return kind         # it calls itself
            self._around.add(id(value))
        inside = _INSIDE.get(kind)
        if inside or isinstance(value, (list, tuple, deque)):
            return kind, tuple([self._about(one, exact) for one in (
                inside(value) if inside else value)])
        if not exact and isinstance(value, (float, numpy.inexact)):
            return kind
        try:
            hash(value)
        except TypeError:
            self._is_unlike = True
            return None
        return kind, value

    def _about_array(self, value: Any, exact: bool) -> Any:
        array, names = nested.array_of(value), self._names
        wants = array is not value and value.requires_grad
        program = array.program if is_placeholder(array) else self._program
        if (program is None and array.source not in names.parameters) or (
                isinstance(value, chainer.Parameter) and not names.of(value)):
            raise ValueError(
                f'{user_line()}: the model uses a parameter that is not among '
                'its own; register it in init_scope, and give the optimizer '
                'the whole model (disable_update() freezes links)')
        if is_placeholder(array):
            if exact and array.dtype.kind == 'b':
                raise looked_at(array, 'indexing by a condition')
            self.read.append(array.source if program in (None, self._program)
                             else self._program.pin(array))
            return array.shape, array.dtype, wants
        if array is not value and value._node._creator_node is not None:
            raise ValueError(
                f'{user_line()}: a variable of an earlier batch or micro-batch'
                ' brings its graph; keep it in an attribute of a link, or call'
                ' its unchain()')
        return (array.shape, array.dtype, wants, self.owner_of(array),
                hashlib.sha256(array.tobytes()).digest()
                if exact and array.dtype.kind in 'biu' else None)


def persistent_in(link: chainer.Link) -> list[Any]:
    """The persistent arrays of a link."""
    return [value for name in link._persistent if isinstance(
        value := vars(link).get(name), nested.ARRAYS)]
