"""A model that can be cut into stages."""
from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Sequence
from typing import Any

from ...mpi.ranks import all_ranks
from ...pipeline.layers import Layer, LayerError
from .balance import chunk_counts
from .layer_list import LayerList
from .layer_slots import LayerRange
from .lazy import without_values
from .model_table import describe, rows_of, table
from .shared_parameters import check_cut, things_used


class Divisible(LayerList):
    """A ``chainer.Sequential`` that can be cut between any two layers.

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

    A model can do what a list can.  A part keeps the numbers of the whole:
    its layers can be replaced, and parts that follow each other be added up,
    but what would give layers of the whole other numbers is an error.  A
    layer may be a method of the model; a lambda that refers to ``self``
    would keep the whole model in memory.

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
            return super().__getitem__(i)
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
        made: dict[int, Any] = {}
        part._others = {
            number: _rebound(without_values(slot, made), self, part)
            for number, slot in self.all_slots() if number not in inside}
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
    texts = [f'rank {rank}: {text}'
             for rank, text in enumerate(gather(problem)) if text]
    if texts:
        raise LayerError('; '.join(texts)) from cause
