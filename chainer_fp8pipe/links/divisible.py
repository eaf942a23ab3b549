"""A model of numbered layers that can be cut into stages."""
# A model is a list of slots: layers, or lazy ones that are not built yet.  A
# part is a model of the same class that has some of them, and numbers them as
# the whole does (LayerRange), so that names, keys of snapshots, initial values
# and masks of dropout do not depend on the cut.  It holds no layer of another
# part: what the user's attributes hold of these is left out (_leave), and a
# cut through what two layers share is an error (shared_parameters.check_cut).
#
# A layer is built where it is first asked for, with NumPy's generator seeded
# by the model's seed and the layer's number: a rank that builds layers 40 to
# 59 alone gets the values that one process would give them.  Building all and
# throwing most away would take the memory that the cut is to save.
#
# Chainer's Sequential is not the base: it gives links other numbers than
# layers, yields a link at two places twice, and has some twenty operations of
# lists that a part could not carry out.
from __future__ import annotations

import contextlib
import copy
import itertools
import operator
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import chainer
from chainer import Link

from ..mpi import all_ranks, end_together
from ..pipeline.layers import Layer, LayerError, as_tuple, layer_name
from .balance import chunk_counts
from .layer_table import describe, rows_of, table
from .lazy import Lazy, initialising
from .shared_parameters import check_cut, things_used


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


class Divisible(Link):
    """A list of layers that can be cut between any two layers.

    The paper's program 2 (section 4.1)::

        class NN(Divisible):
            def __init__(self):
                super().__init__()
                self.append(L.Linear(3072, 3072))
                self.append(F.relu)
                self.append(L.Linear(3072, 10))

        model = NN().divide(start, end)     # the layers start to end - 1
        model = NN().stage(comm)            # or an even share for this rank

    Links, functions and whatever else can be called are layers.  A layer
    that returns a tuple calls the next one with so many arguments, so that
    what skips layers can travel along.  Names of links and parameters and
    keys of snapshots come from the index in the whole model, functions
    included, and so are the same for every cut: ``'/2/W'`` above.

    Layers are added by ``append`` and ``extend``, and replaced by
    ``model[i] = layer``; a part keeps the numbers of the whole.  A layer may
    be a method of the model; a lambda that refers to ``self`` would keep the
    whole model in memory.

    Args:
        layers: The layers; :func:`lazy` ones are built when they are asked
            for.
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
        Divisible: 3 layers, 23 parameters
             0  Linear(in_size=4, out_size=3, nobias=False)                  15
             1  relu
             2  Linear(in_size=3, out_size=2, nobias=False)                   8
    """

    _slots: list[Any]       # layers, or lazies not built yet
    _seed: int
    _part: LayerRange | None    # None: this is the whole model
    _complete: bool         # all lazies are built
    _initialised: bool      # no parameter waits for its shape

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Not in __init__: a user's may append before it calls ours, or never
        # call it (as in the paper's Program 2).
        self = super().__new__(cls)
        chainer.Link.__init__(self)
        self._slots = []
        self._seed = 0
        self._part = None
        self._complete = self._initialised = False
        return self

    def __init__(self, *layers: Any, seed: int = 0) -> None:
        # Link's was called by __new__.
        self.seed = seed
        self.extend(layers)

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

    def children(self) -> Iterator[Link]:
        """The links that are layers, each once."""
        return (link for _, link in self._numbered_links())

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
        theirs = dict(other._numbered_layers() if isinstance(other, Divisible)
                      else enumerate(other) if isinstance(
                          other, chainer.Sequential) else ())
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

    # --- a list -------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Any]:
        return iter([layer for _, layer in self._numbered_layers()])

    def append(self, layer: Any) -> None:
        """Adds a layer at the end."""
        self.extend([layer])

    def extend(self, layers: Iterable[Any]) -> None:
        """Adds layers at the end; those of a model are not built."""
        if self._part:
            raise ValueError(
                f'{self!r} is a part, whose layers keep the numbers of the '
                'whole model; change the whole and divide it again, or make '
                'a new model of these layers: Divisible(*part)')
        self._slots += [self._checked(layer) for layer in (
            layers._slots if isinstance(layers, Divisible) else layers)]
        self._changed()

    def __setitem__(self, i: SupportsIndex, layer: Any) -> None:
        self._slots[self._position(i)] = self._checked(layer)
        self._changed()

    def _position(self, i: SupportsIndex) -> int:
        try:
            return range(len(self))[i]
        except IndexError:
            raise IndexError(f'there is no layer at position {i}: {self!r} '
                             f'has {len(self)}') from None

    def _changed(self) -> None:
        self._complete = self._initialised = False
        self._name_links()

    def _checked(self, layer: Any) -> Any:
        if isinstance(layer, type) and issubclass(layer, Link):
            raise ValueError(
                f'{layer.__name__} is a class, not a layer; write '
                f'{layer.__name__}(...) or lazy({layer.__name__}, ...)')
        if layer is self:
            raise ValueError('a model cannot be a layer of itself')
        if not isinstance(layer, Lazy) and not callable(layer):
            raise ValueError('a layer must be callable: a link, a function, '
                             f'or lazy(...), not {layer!r}')
        return layer

    def _alike(self) -> Any:
        """A model of this class and with its attributes, without layers."""
        result = type(self).__new__(type(self))
        vars(result).update(vars(self))
        result._slots, result.name = [], None
        result._complete = result._initialised = False
        hooks = self._local_link_hooks
        result._local_link_hooks = None if hooks is None else hooks.copy()
        return result

    def copy(self, mode: str = 'share') -> Any:
        """A copy of the same class, with copies of the layers, built.

        Args:
            mode: ``'share'``: parameters share their arrays with these.
                ``'copy'``: they have equal values.

        Raises:
            ValueError: For ``'init'``: make the model anew.
        """
        if mode not in ('share', 'copy'):
            raise ValueError(f"mode must be 'share' or 'copy', not {mode!r}; "
                             'for new initial values make the model anew')
        memo: dict[int, Any] = {
            id(parameter.array): parameter.array for parameter
            in self.params() if mode == 'share'}
        result = copy.deepcopy(self, memo)
        result.name = None
        return result

    def device_resident_accept(self, visitor: Any) -> None:
        """Moves all layers, as ``to_device`` asks for."""
        super().device_resident_accept(visitor)
        for child in self.children():
            child.device_resident_accept(visitor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Chainer's would pickle functions.
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        for name, value in vars(self).items():
            vars(result)[name] = copy.deepcopy(value, memo)
        return result

    # --- what is here -------------------------------------------------------

    @property
    def pieces(self) -> tuple[tuple[Layer, ...], ...]:
        """The numbered layers, built, of each chunk that is here."""
        layers = iter(self._numbered_layers())
        return tuple(tuple(itertools.islice(layers, end - start))
                     for start, end in self.bounds)

    @property
    def layout(self) -> tuple[tuple[int, int], ...] | None:
        """Start and end of every chunk of the whole model, in its order.

        Chunk ``c`` is on stage ``c % stages``.  None for what :meth:`stage`
        did not make.
        """
        return self._part.layout if self._part else None

    def __repr__(self) -> str:
        return f'<{describe(self)}>'

    def __str__(self) -> str:
        return table(self)

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
        here = {number for number, _ in self.numbered_slots()}
        if min(start, end) < 0 or not here.issuperset(range(start, end)):
            raise IndexError(
                f'divide({start}, {end}) is out of range: {self!r} has '
                f'{len(self)} of the layers 0 to {self.total - 1}')
        if start >= end:
            raise ValueError(f'divide({start}, {end}) has no layers: start '
                             'must be less than end, which is exclusive')
        return self._cut(((start, end),))

    def stage(self, comm: Any, balance: str | Sequence[int] = 'parameters',
              chunks: int = 1, example: Any = None) -> Any:
        """This rank's share of the whole model; call it on all ranks.

        Args:
            comm: The ranks of one pipeline, in the order of the stages: a
                communicator of mpi4py's or ChainerMN's, or a
                ``ProcessGrid``.
            balance: The measure that is divided evenly: ``'parameters'``
                (their number, and with it the memory), ``'layers'`` (their
                number), or ``'time'`` (seconds of forward and backward,
                measured on ``example`` by rank 0).  Or the number of layers
                of each chunk.
            chunks: How many chunks each rank gets, for the schedules
                that take several; chunk ``c`` goes to rank ``c % comm.size``.
            example: An input, or a tuple of them, of the size of one
                micro-batch, for ``'time'``, and for ``'parameters'`` if
                some get their shape from the first input.  On the device
                that is to be measured.

        Returns:
            A model of the same class, as :meth:`divide` does.

        Raises:
            ValueError: There are more chunks than layers, the counts do not
                fit, or layers on two ranks share parameters; on all ranks.
            LayerError: A layer failed while it was built or measured; on all
                ranks.
        """
        if self._part:
            raise ValueError(f'{self!r} is a part already; call stage of the '
                             'whole model')
        is_grid = hasattr(comm, 'stage_index')      # whose ranks are others
        stage, stages = ((comm.stage_index, comm.stages) if is_grid
                         else (comm.rank, comm.size))
        counts, parameters = chunk_counts(self, stages, chunks, balance, comm,
                                          example)
        ends = list(itertools.accumulate(counts))
        layout = tuple(zip([0, *ends], ends, strict=False))
        owner = {number: chunk % stages
                 for chunk, (start, end) in enumerate(layout)
                 for number in range(start, end)}
        check_cut(self.numbered_slots(), owner.__getitem__)
        part = self._cut(
            layout[stage::stages], parameters, layout=layout, stage=stage,
            stages=tuple(
                f'stage {number}' + ('' if is_grid else f', rank {number}')
                for number in range(stages)))
        _build_together(part, comm)
        return part

    def __getitem__(self, i: Any) -> Any:
        if not isinstance(i, slice):
            position = self._position(i)
            return self._build(position, self.numbered_slots()[position][0])
        start, end, step = i.indices(len(self))
        if step != 1:
            raise ValueError(
                'a part has consecutive layers; for a new model of others '
                'write Divisible(*[model[i] for i in ...])')
        numbers = [number for number, _ in self.numbered_slots()[start:end]]
        # Numbers that grow with their positions are consecutive.
        runs = [[number for _, number in run] for _, run in itertools.groupby(
            enumerate(numbers), lambda pair: pair[1] - pair[0])]
        return self._cut(tuple((run[0], run[-1] + 1) for run in runs))

    def _cut(self, bounds: tuple[tuple[int, int], ...],
             parameters: Sequence[int | None] | None = None,
             **layout: Any) -> Any:
        inside = list(itertools.chain(*itertools.starmap(range, bounds)))
        check_cut(self.numbered_slots(), inside.__contains__)
        part = self._alike()
        slots = dict(self.numbered_slots())
        part._slots = [_rebound(slots[number], self, part)
                       for number in inside]
        # All layers are no part, but they may be all that there is.
        if layout or bounds != ((0, self.total),):
            part._part = LayerRange(
                self.total, bounds, rows_of(self, parameters), **layout)
        part._leave(self, [slot for number, slot in slots.items()
                           if number not in inside])
        part._name_links()
        return part

    def _leave(self, whole: Divisible, outside: list[Any]) -> None:
        """Drops attributes that hold other layers of the whole model."""
        gone = {id(thing) for thing in things_used(outside, whole)}
        for name in vars(self).keys() - _OWN:
            value = _rebound(vars(self)[name], whole, self)
            if any(id(thing) in gone for thing in things_used(value, whole)):
                delattr(self, name)
            else:
                setattr(self, name, value)


#: Attributes that are not the user's.
_OWN = frozenset([*vars(Divisible()), '_local_link_hooks'])


def _rebound(layer: Any, whole: Divisible, part: Divisible) -> Any:
    """A layer; in place of a method of the whole, that of the part."""
    if isinstance(layer, types.MethodType) and layer.__self__ is whole:
        return types.MethodType(layer.__func__, part)
    return layer


def _build_together(part: Divisible, comm: Any) -> None:
    """Builds the lazy layers of this rank's part; a failure is raised on all.

    A rank that raised alone would end, and the others would wait for it.
    """
    problem, cause = '', None
    try:
        part._numbered_layers()
    except Exception as error:      # the ranks that wait must hear of it
        problem, cause = str(error) or repr(error), error
    gather = getattr(all_ranks(comm), 'allgather', None)
    if gather is None:
        if cause:
            raise cause
        return
    end_together(comm)
    texts = [f'rank {rank}: {text}'
             for rank, text in enumerate(gather(problem)) if text]
    if texts:
        raise LayerError('; '.join(texts)) from cause


@contextlib.contextmanager
def _inside(name: str) -> Iterator[None]:
    """Adds the outer layer's name to an error about a layer inside."""
    try:
        yield
    except LayerError as error:
        raise LayerError(f'{error} (inside of {name})') from error
