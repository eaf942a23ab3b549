"""A model of numbered layers that can be cut into stages."""
# A Divisible is Chainer's list of links, in which every layer keeps its place
# for good: a layer that is no link is held by a `Call`, and a part of a model
# has an `Elsewhere` at each place that is not here.  So names of links and
# parameters and keys of snapshots are Chainer's own, and no cut changes them;
# copies, devices, gradients and files are Chainer's as well.
#
# Initial values and masks of dropout do not depend on the cut either: what has
# no values yet (`lazy`) draws them from a generator seeded by the model's seed
# and the layer's number.  A rank draws those of its own layers only, as
# drawing all would take the memory that the cut is to save.
#
# A part holds no layer of another one: what the user's attributes hold of
# these is left out (`_leave`).  Layers that share parameters must be in one
# part; a function that uses a parameter of another part, which its closure
# may hide, is refused when it runs (pipeline.layers).
#
# A pipeline runs the layers and not the model: what a subclass does besides
# would be passed over, so `stage` refuses it.
from __future__ import annotations

import copy
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import chainer
from chainer import Link

from ..chains.deferred import deferred, draw_later
from ..chains.placeholder import is_placeholder
from ..chains.saving import check_whole
from ..mpi import all_ranks
from ..mpi.world import enter_world
from ..pipeline.layers import (
    Layer,
    LayerError,
    as_tuple,
    kind_of,
    layer_name,
)
from .balance import check_balance, chunk_counts
from .shared_parameters import check_cut, held

#: First and last-plus-one layer of some runs.
Bounds = tuple[tuple[int, int], ...]

_made = itertools.count()       # layers by lazy()


def lazy(factory: Callable, *args: Any, **kwargs: Any) -> Any:
    """A layer of a :class:`Divisible` whose parameters take no memory yet::

        model.append(lazy(L.Linear, 3072, 3072))

    The rank that owns the layer draws its parameters at their first use.
    Values depend on the model's seed and the layer's index in the whole model:
    they are the same for every cut.

    Args:
        factory: A class or function that makes the layer of the arguments.

    Raises:
        TypeError: ``factory`` cannot be called, is a layer already, or does
            not make one.

    .. admonition:: Example

        >>> import chainer.links as L
        >>> from chainer_fp8pipe.links import Divisible, lazy
        >>> Divisible(lazy(L.Linear, 3, 2))[0].W.shape
        (2, 3)
    """
    if isinstance(factory, chainer.Link):
        kind = type(factory).__name__
        raise TypeError(
            f'lazy takes a maker of a layer, and this {kind} is a layer '
            f'already; write lazy({kind}, ...), or use the layer as it is')
    if not callable(factory):
        raise TypeError('lazy takes a class or function that makes a layer, '
                        f'not {factory!r}')
    # A model gives seeds of its own; elsewhere no two layers are equal.
    with deferred(next(_made), everything=True):
        layer = factory(*args, **kwargs)
    if not callable(layer):
        raise TypeError(f'{factory!r} returned {layer!r}, which is not a '
                        'layer')
    return layer


def _draw_by_place(layer: chainer.Link, seed: int, number: int) -> None:
    """Seeds a layer's parameters without values by its place in a model.

    Also those that get their shape from the first input: their values must
    not depend on what was drawn before.
    """
    for position, parameter in enumerate(layer.params()):
        array = parameter._data[0]
        if array is None or is_placeholder(array):
            draw_later(parameter, seed, seed >> 32, number, position)


class Call(Link):
    """A place in a model with a function, or a link that has one already."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, *xs: Any) -> Any:
        return self.function(*xs)

    def __str__(self) -> str:
        return kind_of(self.function)


class Elsewhere(Link):
    """A place of a part whose layer is in another part."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def __str__(self) -> str:
        return self._text


class Divisible(chainer.ChainList):
    """A list of layers that can be cut between any two layers.

    The paper's program 2 (section 4.1).  ``model.divide(start, end)`` has the
    layers start to end - 1, and ``model.stage(comm)`` this rank's even share.

    Links, functions and other callables are layers.  A tuple that a layer
    returns becomes the arguments of the next one.  Names of parameters and
    keys of snapshots come from the index in the whole model, for every cut.

    ``append`` and ``extend`` add layers at the end, and ``model[i] = layer``
    replaces one.  A layer may be a method of the model, but a lambda with
    ``self`` in it keeps the whole model in memory.

    Args:
        layers: The layers; those of :func:`lazy` get values where they are
            used.
        seed: Of the initial values of lazy layers.

    .. admonition:: Example

        >>> import chainer.functions as F, chainer.links as L
        >>> from chainer_fp8pipe.links import Divisible
        >>> model = Divisible(L.Linear(4, 3), F.relu, L.Linear(3, 2))
        >>> part = model.divide(1, 3)
        >>> [name for name, _ in part.namedparams()]
        ['/2/W', '/2/b']
        >>> part
        <Divisible: layers 1 to 2 of 3>
        >>> print(model)
        Divisible(
          (0): Linear(in_size=4, out_size=3, nobias=False),
          (1): relu,
          (2): Linear(in_size=3, out_size=2, nobias=False),
        )

    Attributes:
        is_part: Whether this is a part of a model.
        layout: Start and end of every chunk of the whole model, in order.
            Chunk ``c`` is on stage ``c % stages``.  None: :meth:`stage` has
            not made the model.
        foreign: Parameters of layers that are not here, by identity, with
            the name of the layer.  Weak references.
    """

    foreign: dict[int, tuple[weakref.ref, str]]
    _bounds: Bounds
    _sizes: Sequence[int | None]    # of all layers, found when it was cut
    _seed: int
    is_part: bool
    layout: Bounds | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Not in __init__: a user's may append before it calls ours, or never
        # call it (as in the paper's Program 2).
        self = super().__new__(cls)
        chainer.ChainList.__init__(self)
        self._bounds, self._seed = (), 0
        self.is_part, self.layout = False, None
        self.foreign = {}
        return self

    def __init__(self, *layers: Any, seed: int = 0) -> None:
        # ChainList's was called by __new__.
        self.seed = seed
        self.extend(layers)

    @property
    def seed(self) -> int:
        """Seed of the initial values of lazy layers."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = operator.index(seed)
        for number, child in enumerate(self):
            _draw_by_place(child, self._seed, number)

    # --- layers -------------------------------------------------------------

    def insert(self, index: int, layer: Any) -> None:
        """Adds a layer; ``append`` and ``extend`` call it.

        Raises:
            ValueError: It is no layer, or is to be elsewhere than at the
                end, or the model is a part.
        """
        if self.is_part or index != len(self):
            raise ValueError(
                f'layers of {self!r} keep their numbers; add layers at the '
                'end of the whole model, or make a new one of these')
        super().insert(index, self._held(layer, index))

    def __setitem__(self, index: Any, layer: Any) -> None:
        super().__setitem__(operator.index(index), self._held(layer, index))

    def __delitem__(self, index: Any) -> NoReturn:
        raise ValueError(f'layers of {self!r} keep their numbers; make a new '
                         'model of the others')

    def _held(self, layer: Any, index: int) -> Link:
        """The link that holds a layer at its place."""
        if isinstance(layer, type) and issubclass(layer, Link):
            raise ValueError(
                f'{layer.__name__} is a class, not a layer; write '
                f'{layer.__name__}(...) or lazy({layer.__name__}, ...)')
        if layer is self:
            raise ValueError('a model cannot be a layer of itself')
        if not callable(layer):
            raise ValueError('a layer must be callable: a link, a function, '
                             f'or lazy(...), not {layer!r}')
        if not isinstance(layer, Link) or any(layer is one for one in self):
            return Call(layer)
        _draw_by_place(layer, self._seed, index)
        return layer

    def numbered_layers(self) -> list[Layer]:
        """Number and layer of all that is here."""
        return list(itertools.chain(*self.pieces))

    @property
    def bounds(self) -> Bounds:
        """Start and end (exclusive) of each run of layers that are here."""
        return self._bounds if self.is_part else ((0, len(self)),)

    @property
    def pieces(self) -> tuple[tuple[Layer, ...], ...]:
        """The numbered layers of each chunk that is here."""
        return tuple(tuple((number, _layer(self[number]))
                           for number in range(*run)) for run in self.bounds)

    def sizes(self) -> list[int | None]:
        """Number of parameters of each layer; None where it is not known.

        Shared ones count where they are first.
        """
        seen: set[int] = set()
        found: list[int | None] = []
        for child in self:
            own = [parameter._data[0] for parameter in child.params()
                   if id(parameter) not in seen]
            seen.update(map(id, child.params()))
            found.append(None if any(array is None for array in own)
                         else sum(array.size for array in own))
        return found

    def forward(self, *xs: Any) -> Any:
        """Runs the layers, which must follow one another.

        A tuple (or list) that a layer returns becomes the arguments of the
        next.
        """
        ends = [end for _, end in self.bounds[:-1]]
        if ends != [start for start, _ in self.bounds[1:]]:
            raise RuntimeError(f'{self!r} cannot be run at a stretch, as '
                               'layers are missing between; run its pieces')
        if not len(self):
            raise RuntimeError(f'{self!r} does not have any layer')
        value: Any = xs
        for number, layer in self.numbered_layers():
            value = layer(*as_tuple(value))
            if value is None:
                raise TypeError(f'{layer_name(number, layer)} returned None; '
                                'a layer returns a variable, an array, or a '
                                'tuple of these')
        return value

    # --- a link -------------------------------------------------------------

    def init_scope(self, *_: Any) -> NoReturn:
        """Raises TypeError: a model holds nothing but layers."""
        raise TypeError(
            f'{type(self).__name__} holds layers only, as everything else '
            'could not be cut; append a link that holds what you wanted to '
            'register')

    add_persistent = register_persistent = init_scope

    def serialize(self, serializer: Any) -> None:
        """As Chainer's; raises :class:`NotWhole` of a stage to be saved."""
        check_whole(serializer, self, self.layout is None or not any(
            isinstance(layer, Elsewhere) for layer in self))
        super().serialize(serializer)

    def copy(self, mode: str = 'share') -> Any:
        """A copy of the same class, with copies of the layers.

        Args:
            mode: ``'share'``: parameters share their arrays with these.
                ``'copy'``: they have equal values.

        Raises:
            ValueError: For ``'init'``: make the model anew.
        """
        if mode not in ('share', 'copy'):
            raise ValueError(f"mode must be 'share' or 'copy', not {mode!r}; "
                             'for new initial values make the model anew')
        # Not Chainer's: a link may be at two places.
        memo: dict[int, Any] = {
            id(parameter.array): parameter.array for parameter
            in self.params() if mode == 'share'}
        result = copy.deepcopy(self, memo)
        result.name = None
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), 'foreign': {}}    # references are of here

    def __repr__(self) -> str:
        runs = [f'layer {start}' if end == start + 1
                else f'layers {start} to {end - 1}'
                for start, end in self.bounds]
        return f'<{type(self).__name__}: ' + (
            f'{" and ".join(runs)} of {len(self)}>' if self.is_part
            else f'{len(self)} layer{"s" * (len(self) != 1)}>')

    # --- cutting ------------------------------------------------------------

    def divide(self, start: int, end: int) -> Any:
        """The layers ``start`` to ``end - 1`` of the whole model.

        Returns:
            A model of the same class, which shares its layers with this
            one.  Its attributes are those of this model, without those that
            hold layers outside of the part.

        Raises:
            IndexError: Such layers are not here.
            ValueError: The part would be empty, or a layer inside shares
                parameters with one outside; the message names both.
        """
        start, end = operator.index(start), operator.index(end)
        here = {number for number, _ in self.numbered_layers()}
        if min(start, end) < 0 or not here.issuperset(range(start, end)):
            raise IndexError(
                f'divide({start}, {end}) is out of range: {self!r} has '
                f'{len(here)} of the layers 0 to {len(self) - 1}')
        if start >= end:
            raise ValueError(f'divide({start}, {end}) has no layers: start '
                             'must be less than end, which is exclusive')
        return self._cut(((start, end),))

    def stage(self, comm: Any, balance: str | Sequence[int] = 'parameters',
              chunks: int = 1) -> Any:
        """This rank's share of the whole model; call it on all ranks.

        Args:
            comm: The ranks of one pipeline, in the order of the stages.  A
                communicator of mpi4py's or ChainerMN's, or a
                ``ProcessGrid``.
            balance: The measure that is divided evenly: the numbers of
                ``'parameters'`` (and so the memory) or of ``'layers'``.  Or
                the number of layers of each chunk.
            chunks: Chunks of each rank, for schedules with several.  Chunk
                ``c`` goes to rank ``c % comm.size``.

        Returns:
            A model of the same class, as :meth:`divide` does.

        Raises:
            ValueError: On all ranks: ranks have other layers or arguments,
                there are more chunks than layers, the counts do not fit,
                sizes are not known, layers on two ranks share parameters, the
                class has a ``forward`` of its own, or the model hooks.
            LayerError: Values cannot be drawn; on all ranks.
        """
        enter_world(comm)
        is_grid = hasattr(comm, 'stage_index')      # whose ranks are others
        stage, stages = ((comm.stage_index, comm.stages) if is_grid
                         else (comm.rank, comm.size))

        def check() -> tuple[int, str | list[int], list[int]]:
            self._refuse_own_ways()
            each = operator.index(chunks)
            if each < 1:
                raise ValueError(f'a rank has 1 chunk or more, not {each}')
            if len(self) < stages * each:
                raise ValueError(
                    f'{self!r} has {len(self)} layers, too few for '
                    + (f'{stages} ranks' if each == 1 else
                       f'the {stages * each} chunks of {stages} ranks with '
                       f'{each} each')
                    + '; use fewer ranks, or more and smaller layers')
            measure = check_balance(balance, stages * each, len(self))
            return each, measure, chunk_counts(
                measure, stages * each, self.numbered_layers(), self.sizes())
        _, _, counts = _together(
            comm, check, lambda found: self._agreed(*found))
        ends = list(itertools.accumulate(counts))
        layout = tuple(zip([0, *ends], ends, strict=False))
        owner = {number: chunk % stages
                 for chunk, (start, end) in enumerate(layout)
                 for number in range(start, end)}

        def cut() -> Any:
            check_cut(self.numbered_layers(), owner.__getitem__)
            part = self._cut(layout[stage::stages], lambda number: (
                f'on stage {owner[number]}'))
            part.layout = layout
            return part
        part = _together(comm, cut)

        def draw() -> None:
            for parameter in part.params():
                _ = parameter.array     # reading it draws the values
        _together(comm, draw, error=LayerError)
        return part

    def add_hook(self, hook: Any, name: str | None = None) -> Any:
        """As Chainer's; a stage, which is not called as a whole, refuses."""
        if self.layout is not None:
            raise ValueError(_NO_HOOKS)
        return super().add_hook(hook, name)

    def _refuse_own_ways(self) -> None:
        """Raises ValueError for what a pipeline would pass over."""
        if self.is_part:
            raise ValueError(f'{self!r} is a part already; call stage of the '
                             'whole model')
        for name in 'forward', '__call__':
            if name in vars(self) or getattr(type(self), name) is not getattr(
                    Divisible, name):
                raise ValueError(
                    f'{type(self).__name__} has a {name} of its own, which a '
                    'pipeline would pass over, as it runs the layers one by '
                    'one; make what it does a layer')
        if self._local_link_hooks:
            raise ValueError(_NO_HOOKS)

    def _agreed(self, chunks: int, balance: str | list[int],
                counts: list[int]) -> dict[str, str]:
        """What must be the same on all ranks."""
        return {
            'chunks': str(chunks), 'balance': str(balance),
            'the number of layers': str(len(self)),
            'the seed of the model': str(self.seed),
            **{f'layer {number}': kind_of(layer)
               for number, layer in self.numbered_layers()},
            **{f'the parameter {name}': 'without a shape' if array is None
               else f'{array.dtype} {tuple(array.shape)}'
               for name, parameter in self.namedparams()
               for array in parameter._data[:1]}}

    def _cut(self, bounds: Bounds,
             place: Callable[[int], str] = lambda number: 'elsewhere') -> Any:
        inside = set(itertools.chain(*itertools.starmap(range, bounds)))
        check_cut(self.numbered_layers(), inside.__contains__)
        part = type(self).__new__(type(self))
        vars(part).update(vars(self))
        part.name, part.is_part = None, True
        part._bounds = bounds
        if self._local_link_hooks is not None:
            part._local_link_hooks = self._local_link_hooks.copy()
        part._children = []
        for number, child in enumerate(self):
            if number not in inside and not isinstance(child, Elsewhere):
                child = Elsewhere(f'{child}, {place(number)}')
            elif isinstance(child, Call):
                child = Call(_rebound(child.function, self, part))
            child.name = str(number)
            part._children.append(child)
        outside = [(number, layer) for number, layer in self.numbered_layers()
                   if number not in inside]
        part.foreign = self.foreign | {
            id(thing): (weakref.ref(thing), layer_name(number, layer))
            for number, layer in outside for thing in held(layer)
            if isinstance(thing, chainer.Parameter)}
        part._leave(self, [layer for _, layer in outside])
        return part

    def _leave(self, whole: Divisible, outside: list[Any]) -> None:
        """Drops attributes that hold other layers of the whole model."""
        gone = {id(thing) for thing in held(outside)}
        for name in vars(self).keys() - _OWN:
            value = _rebound(vars(self)[name], whole, self)
            if value is not whole and any(
                    id(thing) in gone for thing in held(value, whole)):
                delattr(self, name)
            else:
                setattr(self, name, value)


_NO_HOOKS = ('a stage of a pipeline runs layers one by one, so that hooks of '
             'the whole model would not be called; add them to layers')
#: Attributes that are not the user's.
_OWN = frozenset([*vars(Divisible()), '_local_link_hooks'])


def _layer(child: Link) -> Any:
    """What is called at a place."""
    return child.function if isinstance(child, Call) else child


def _rebound(layer: Any, whole: Divisible, part: Divisible) -> Any:
    """A layer; in place of a method of the whole, that of the part."""
    if isinstance(layer, types.MethodType) and layer.__self__ is whole:
        return types.MethodType(layer.__func__, part)
    return layer


def _together(comm: Any, action: Callable[[], Any],
              entries: Callable[[Any], dict[str, str]] | None = None,
              error: type[Exception] = ValueError) -> Any:
    """``action`` on all ranks: what fails or differs on one raises on all.

    A rank that raised alone would end, and the others would wait for it.
    """
    if not hasattr(all_ranks(comm), 'Iallreduce'):
        return action()         # a rank and a size, without MPI
    from ..mpi.agreement import raise_together
    return raise_together(
        all_ranks(comm), action, error, entries,
        'Build the same model on all ranks, and pass the same to stage().')
