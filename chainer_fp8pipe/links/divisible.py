"""A model of numbered layers that can be cut into stages."""
# A Divisible is Chainer's list of links, in which every layer keeps its place
# for good: a layer that is no link is held by a `Call`, and a stage has one
# without a function at each place that is not here.  So names, keys of
# snapshots, copies, devices and files are Chainer's own.
#
# Initial values do not depend on the cut either: what has none yet (`lazy`)
# draws them from a generator seeded by the model's seed and the layer's
# number.  A rank draws those of its own layers only, as drawing all would take
# the memory that the cut is to save.
#
# Links that share parameters must be on one rank; a function, method or
# partial that uses a parameter of another rank is refused when it runs
# (pipeline.layers).
from __future__ import annotations

import copy
import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import chainer
from chainer import Link

from ..chains.deferred import deferred, draw_later
from ..chains.placeholder import is_placeholder
from ..chains.saving import OPTIMIZERS, check_whole
from ..pipeline.layers import Layer, as_tuple, kind_of, layer_name

#: First and last-plus-one layer of some runs.
Bounds = tuple[tuple[int, int], ...]

_made = itertools.count()       # layers by lazy()


def lazy(factory: Callable, *args: Any, **kwargs: Any) -> Any:
    """A layer of a :class:`Divisible` whose parameters take no memory yet::

        model.append(lazy(L.Linear, 3072, 3072))

    The rank that owns the layer draws its parameters at their first use.
    Values depend on the model's seed and the layer's index in the whole model:
    they are the same for every cut.  ``factory`` is a class or function that
    makes the layer of the arguments; else it raises TypeError.

    .. admonition:: Example

        >>> import chainer.links as L
        >>> from chainer_fp8pipe.links import Divisible, lazy
        >>> Divisible(lazy(L.Linear, 3, 2))[0].W.shape
        (2, 3)
    """
    if isinstance(factory, Link) or not callable(factory):
        raise TypeError(
            'lazy takes a class or function that makes a layer, as in '
            f'lazy(L.Linear, 3, 2), not {factory!r}')
    # A model gives seeds of its own; elsewhere no two layers are equal.
    with deferred(next(_made), everything=True):
        return factory(*args, **kwargs)


class Call(Link):
    """A place in a model with a function, or a link that has one already.

    ``text`` describes a layer that is on another stage, in place of it.
    """

    def __init__(self, function: Callable | None, text: str = '') -> None:
        super().__init__()
        self.function, self._text = function, text

    def forward(self, *xs: Any) -> Any:
        assert self.function is not None
        return self.function(*xs)

    def __str__(self) -> str:
        return self._text or kind_of(self.function)


class Divisible(chainer.ChainList):
    """A list of layers that can be cut between any two layers.

    The paper's program 2 (section 4.1).  ``model.divide(start, end)`` has the
    layers start to end - 1, and ``model.stage(comm)`` this rank's even share.

    Links, functions, methods of the model and other callables are layers.  A
    tuple that a layer returns becomes the arguments of the next one.  Names of
    parameters and keys of snapshots come from the index in the whole model,
    for every cut.  Attributes stay on every rank.

    Args:
        layers: The layers; those of :func:`lazy` get values where they are
            used.
        seed: Of the initial values of lazy layers.

    .. admonition:: Example

        >>> import chainer.functions as F, chainer.links as L
        >>> from chainer_fp8pipe.links import Divisible
        >>> model = Divisible(L.Linear(4, 3), F.relu, L.Linear(3, 2))
        >>> part = model.share(1, 2, balance=[1, 2])
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
        layout: Start and end of every chunk of the whole model, in order.
            Chunk ``c`` is on stage ``c % stages``.  None: this is the whole
            model.
        bounds: Start and end (exclusive) of the chunks that are here.
        foreign: The names of layers that are not here, by the nodes of
            their parameters, of which it keeps none alive.
    """

    foreign: Mapping[Any, str] = types.MappingProxyType({})
    layout: Bounds | None = None
    _bounds: Bounds = ()
    _seed = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Not in __init__: a user's may append before it calls ours, or never
        # call it (as in the paper's Program 2).
        self = super().__new__(cls)
        chainer.ChainList.__init__(self)
        return self

    def __init__(self, *layers: Any, seed: int = 0) -> None:
        # ChainList's was called by __new__.
        self._seed = operator.index(seed)
        for number, child in enumerate(self):
            self._seed_layer(child, number)
        self.extend(layers)

    def _seed_layer(self, layer: Link, number: int) -> None:
        """Seeds a layer's parameters without values by its place."""
        for position, parameter in enumerate(layer.params()):
            array = parameter._data[0]
            if array is None or is_placeholder(array):
                draw_later(parameter, self._seed, self._seed >> 32, number,
                           position)

    def insert(self, index: int, layer: Any) -> None:
        """Adds a layer at the end; ``append`` and ``extend`` call it."""
        if self.layout or index != len(self):
            raise ValueError(_KEEP_NUMBERS.format(self))
        super().insert(index, self._held(layer, index))

    def __setitem__(self, index: Any, layer: Any) -> None:
        super().__setitem__(operator.index(index), self._held(layer, index))

    def __delitem__(self, index: Any) -> NoReturn:
        raise ValueError(_KEEP_NUMBERS.format(self))

    def _held(self, layer: Any, index: int) -> Link:
        """The link that holds a layer at its place."""
        if layer is self or isinstance(layer, type) and issubclass(
                layer, Link) or not callable(layer):
            raise ValueError('a layer must be callable: a link (no class and '
                             'not the model itself), a function, or lazy('
                             f'...), not {layer!r}')
        if not isinstance(layer, Link) or any(layer is one for one in self):
            return Call(layer)
        self._seed_layer(layer, index)
        return layer

    @property
    def bounds(self) -> Bounds:
        """Start and end (exclusive) of each run of layers that are here."""
        return self._bounds or ((0, len(self)),)

    @property
    def is_whole(self) -> bool:
        """Whether all layers are here."""
        return None not in map(_layer, self)

    @property
    def pieces(self) -> list[list[Layer]]:
        """The numbered layers of each chunk that is here."""
        return [[(number, _layer(self[number])) for number in range(*run)]
                for run in self.bounds]

    def sizes(self) -> list[int]:
        """Parameters of each layer, where they are first; or ValueError."""
        found: list[int] = []
        seen: set[int] = set()
        for number, child in enumerate(self):
            own = {id(one): one._data[0] for one in child.params()}
            new = [own[key] for key in own.keys() - seen]
            if any(array is None for array in new):
                raise ValueError(
                    f'{layer_name(number, _layer(child))} learns the shape of '
                    'its parameters from its first input; give it all sizes, '
                    "or pass balance='layers' or a list to stage")
            found.append(sum(array.size for array in new))
            seen |= own.keys()
        return found

    def forward(self, *xs: Any) -> Any:
        """Runs the layers, which must follow one another."""
        if len(self.bounds) != 1 or not len(self):
            raise RuntimeError(
                f'{self!r} cannot be run at a stretch, as it has no layers, '
                'or not those between; run its pieces')
        value: Any = xs
        for _, layer in self.pieces[0]:
            value = layer(*as_tuple(value))
        return value

    def init_scope(self, *_: Any) -> NoReturn:
        """Raises TypeError: a model holds nothing but layers."""
        raise TypeError(
            f'{type(self).__name__} holds layers only, as everything else '
            'could not be cut; append a link that holds what you wanted to '
            'register')

    add_persistent = register_persistent = init_scope

    def serialize(self, serializer: Any) -> None:
        """As Chainer's; raises :class:`NotWhole` of a stage to be saved."""
        check_whole(serializer, self, self.is_whole)
        super().serialize(serializer)

    def copy(self, mode: str = 'share') -> Any:
        """As Chainer's, with mode ``'share'`` (of arrays) or ``'copy'``."""
        if mode not in ('share', 'copy'):
            raise ValueError(f"mode must be 'share' or 'copy', not {mode!r}; "
                             'for new initial values make the model anew')
        # Not Chainer's: a link may be at two places.
        result = copy.deepcopy(self, {
            id(parameter.array): parameter.array for parameter
            in self.params() if mode == 'share'})
        result.name = None
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), 'foreign': {}}    # nodes are of here

    def add_hook(self, hook: Any, name: str | None = None) -> Any:
        """As Chainer's; a stage, which is not called as a whole, refuses."""
        if self.layout:
            raise ValueError(_ONE_BY_ONE)
        return super().add_hook(hook, name)

    def __repr__(self) -> str:
        runs = ' and '.join([
            f'{start} to {end - 1}' if end > start + 1 else f'{start}'
            for start, end in self.bounds])
        return (f'<{type(self).__name__}: layers {runs} of {len(self)}>'
                if self.layout else
                f'<{type(self).__name__}: {len(self)} layers>')

    def stage(self, comm: Any, balance: str | Sequence[int] = 'parameters',
              chunks: int = 1) -> Any:
        """This rank's share of the whole model; call it on all ranks.

        Args:
            comm: The ranks of one pipeline, in the order of the stages: a
                communicator of mpi4py or ChainerMN, or a ``ProcessGrid``.
            balance: What is divided evenly, ``'parameters'`` (and so the
                memory) or ``'layers'``; or the number of layers of each chunk.
            chunks: Of each rank, for schedules with several.

        Returns:
            A model of the same class, which shares layers and attributes
            with this one.

        Raises:
            ValueError: On all ranks: ranks have other layers or arguments,
                these do not fit, layers on two ranks share parameters, or the
                class has a ``forward`` of its own, the model hooks, or
                values cannot be drawn.
        """
        from ..mpi.agreement import raise_together  # which take MPI
        from ..mpi.grid import grid_of
        grid = grid_of(comm)

        def cut() -> Any:
            part = self.share(grid.stage_index, grid.stages, balance, chunks)
            for parameter in part.params():
                _ = parameter.array     # reading it draws the values
            return part
        return raise_together(
            grid.comm, cut, ValueError,
            lambda part: self._agreed(chunks, balance),
            'Build the same model on all ranks, and pass the same to stage().')

    def divide(self, start: int, end: int) -> Any:
        """The layers ``start`` to ``end - 1`` of the whole model.

        As the paper's program 2 cuts; :meth:`stage` asks all ranks whether
        they cut alike.  Raises ValueError if there are no such layers.
        """
        start, end = operator.index(start), operator.index(end)
        if not 0 <= start < end <= len(self):
            raise ValueError(f'{self!r} has no layers {start} to {end - 1}')
        counts = [count for count in (start, end - start, len(self) - end)
                  if count]
        return self.share(bool(start), len(counts), counts)

    def share(self, stage: int, stages: int,
              balance: str | Sequence[int] = 'parameters', chunks: int = 1
              ) -> Any:
        """What :meth:`stage` gives to one of the stages, without MPI."""
        if self.layout:
            raise ValueError(f'{self!r} is a part already; call stage of the '
                             'whole model')
        own = [name for name in ('forward', '__call__') if name in vars(self)
               or getattr(type(self), name) is not getattr(Divisible, name)]
        if own or self._local_link_hooks:
            raise ValueError(f'{type(self).__name__} has a '
                             f'{(*own, "hook")[0]} of its own. {_ONE_BY_ONE}')
        total = stages * operator.index(chunks)
        if not 1 <= total <= len(self):
            raise ValueError(
                f'{self!r} cannot be cut into {chunks} chunks for each of '
                f'{stages} ranks: a chunk has 1 layer or more')
        ends = list(itertools.accumulate(self._counts(balance, total)))
        layout = tuple(zip([0, *ends], ends, strict=False))
        owner = [chunk % stages for chunk, run in enumerate(layout)
                 for _ in range(*run)]
        part = type(self).__new__(type(self))
        vars(part).update(vars(self), name=None, layout=layout, _children=[],
                          _bounds=layout[stage::stages],
                          foreign=weakref.WeakKeyDictionary())
        OPTIMIZERS.hold(part)
        first: dict[int, int] = {}      # layer that holds a thing, by its id
        for number, layer in enumerate(map(_layer, self)):
            name = layer_name(number, layer)
            links = list(layer.links()) if isinstance(layer, Link) else []
            parameters = [one for link in links[:1] for one in link.params()]
            for thing in (*links, *parameters, *[
                    array for array in [one._data[0] for one in parameters]
                    if array is not None and not is_placeholder(array)]):
                other = first.setdefault(id(thing), number)
                if owner[other] != owner[number]:
                    raise ValueError(
                        f'{layer_name(other, _layer(self[other]))} and {name} '
                        f'share the {type(thing).__name__}; cut so that both '
                        'are on one rank, or give one its own parameters')
            child = self[number]
            if owner[number] != stage:
                part.foreign.update((one.node, name) for one in parameters)
                child = Call(None, f'{child}, on stage {owner[number]}')
            elif isinstance(layer, types.MethodType) and (
                    layer.__self__ is self):
                child = Call(types.MethodType(layer.__func__, part))
            child.name = str(number)
            part._children.append(child)
        return part

    def _counts(self, balance: Any, chunks: int) -> list[int]:
        """The number of layers of each chunk of all ranks, or ValueError."""
        if not isinstance(balance, str):
            balance = [operator.index(count) for count in balance]
            if len(balance) == chunks and min(balance) > 0 and (
                    sum(balance) == len(self)):
                return balance
        if balance not in ('parameters', 'layers'):
            raise ValueError(
                f"balance={balance!r} does not fit: it must be 'parameters', "
                f"'layers', or {chunks} numbers of layers, one for each "
                f'chunk, all 1 or more and {len(self)} together')
        return even_parts([1] * len(self) if balance == 'layers'
                          else self.sizes(), chunks)

    def _agreed(self, chunks: int, balance: str | Sequence[int]
                ) -> dict[str, str]:
        """What must be the same on all ranks."""
        return {
            'chunks': str(chunks),
            'balance': str(balance if isinstance(balance, str)
                           else list(map(int, balance))),
            'the number of layers': str(len(self)),
            'the seed of the model': str(self._seed),
            **{f'layer {number}': kind_of(layer)
               for number, layer in self.pieces[0]},
            **{f'the parameter {name}': 'without a shape' if array is None
               else f'{array.dtype} {tuple(array.shape)}'
               for name, parameter in self.namedparams()
               for array in parameter._data[:1]}}


_KEEP_NUMBERS = ('layers of {!r} keep their numbers; add some at the end of '
                 'the whole, or make a new model of others')
_ONE_BY_ONE = ('A pipeline runs layers one by one, and would pass it over; '
               'make it a layer; hooks: add them to layers')


def _layer(child: Link) -> Any:
    """What is called at a place."""
    return child.function if isinstance(child, Call) else child


def even_parts(costs: Sequence[int], parts: int) -> list[int]:
    """How many consecutive layers each part gets; at least one.

    The sum of squares of the parts' costs is as small as it can be, and of
    all such cuts that of the numbers of layers.
    """
    sums = [0, *itertools.accumulate(costs)]

    @functools.cache
    def best(parts: int, end: int) -> tuple[int, int, list[int]]:
        """Both sums of squares, and the numbers, up to a layer."""
        return (0, 0, []) if not parts else min(
            (cost + (sums[end] - sums[start]) ** 2,
             square + (end - start) ** 2, [*counts, end - start])
            for start in range(parts - 1, end if parts > 1 else 1)
            for cost, square, counts in [best(parts - 1, start)])
    return best(parts, len(costs))[2]
