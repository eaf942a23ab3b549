"""A model whose batch normalisation is that of groups of ranks."""
from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import chainer
from chainer.links import BatchNormalization
from chainermn.links import MultiNodeBatchNormalization

from ..links.cutting import held
from ..links.divisible import Divisible
from ..links.grouped_bn import GroupedBatchNormalization
from ..mpi.agreement import agree, raise_together
from ..mpi.grid import Group, ranks_of, split_groups
from ..mpi.world import enter_world


def create_grouped_bn_model(
        model: Any, comm: Any, group_size: int | None = None) -> Any:
    """A copy of a model that normalises over the batches of several ranks.

    Every ``chainer.links.BatchNormalization`` in it becomes a
    :class:`GroupedBatchNormalization`, in chains, lists of links, plain lists
    and a :class:`~chainer_fp8pipe.Divisible` alike.  Parameters, running
    statistics, names and keys of snapshots stay as they are.  Call it on
    all ranks of ``comm``, before ``optimizer.setup``.  From then on, an
    exception that nobody catches ends the job on all ranks.

    Args:
        model: A link.
        comm: The ranks that train equal copies of the model, a communicator
            of mpi4py's or ChainerMN's.  For stages of a pipeline it is
            ``grid.data``, before ``stage`` or after it.  The model must not
            outlive it.
        group_size: So many consecutive ranks make a group; by default all.

    Returns:
        The copy, which cannot be pickled; Chainer's serializers save and
        load it, and load snapshots of ``model`` into it.  Copies of it talk
        to the same ranks.

    Raises:
        TypeError: ``comm`` is no communicator.
        ValueError: On all ranks: the groups do not fit (the message names
            those that do); the ranks' models differ; or a link cannot be
            replaced, such as a ``BatchRenormalization`` or one that only a
            closure holds.
    """
    ranks = ranks_of(comm)
    enter_world()        # or the others would wait in their next batch
    group = Group(split_groups(ranks, group_size))
    result, found = raise_together(
        ranks, lambda: _copied(model), ValueError)
    agree(ranks, {
        f'batch normalisation {number} (called {link.name})':
        f'of size {link.avg_mean.shape}' if link.avg_mean is not None
        else f'over axis {link.axis}'
        for number, link in enumerate(found)},
        remedy='All ranks must have copies of one model, or the same stage of '
        'a pipeline')
    _convert(found, group)
    return result


def _copied(model: Any) -> tuple[Any, list[BatchNormalization]]:
    """A deep copy, and what in it is to be converted."""
    memo: dict[int, Any] = {}
    result = copy.deepcopy(model, memo)
    # Here is all that was copied, in whatever it is held, each thing once.
    found = [thing for thing in memo.values()
             if isinstance(thing, BatchNormalization)]
    for link in found:
        if type(link) not in (BatchNormalization, GroupedBatchNormalization):
            raise ValueError(
                f'a {type(link).__name__} (called {link.name}) cannot be '
                'grouped, only BatchNormalization itself; replace it in the '
                'model')
    for thing in memo.values():
        if isinstance(thing, MultiNodeBatchNormalization):
            raise ValueError(
                f"a MultiNodeBatchNormalization (called {thing.name}) has "
                "ChainerMN's group of all ranks already; use "
                'BatchNormalization in the model')
    known = set(map(id, found))
    for thing in _behind_functions(memo):
        if isinstance(thing, BatchNormalization) and id(thing) not in known:
            raise ValueError(
                f'a {type(thing).__name__} (called {thing.name}) is held by '
                'a function that cannot be copied; make it a layer, or an '
                'attribute of a link')
    return result, found


def _behind_functions(memo: dict[int, Any]) -> Iterator[Any]:
    """Links that functions in what was copied find by their names."""
    kept = memo.get(id(memo))       # the originals
    for thing in memo.values():
        values: Any = thing.values() if isinstance(thing, dict) else (
            thing if isinstance(thing, (list, tuple, set)) else (thing,))
        for value in values if thing is not kept else ():
            for one in _found_by(value):
                # A function may refer to its model.
                if not isinstance(one, Divisible):
                    yield from held(one)


def _found_by(value: Any) -> Iterator[Any]:
    """What a function, or what is called as one, finds by name."""
    while isinstance(value, functools.partial):
        value = value.func
    if callable(value) and not isinstance(value, (type, chainer.Link,
                                                  types.FunctionType)):
        value = vars(type(value)).get('__call__')
    if isinstance(value, types.FunctionType):
        yield from (*(value.__defaults__ or ()),
                    *(value.__kwdefaults__ or {}).values())
        with contextlib.suppress(ValueError):   # no value there yet
            names = inspect.getclosurevars(value)
            yield from (*names.nonlocals.values(), *names.globals.values())


def _convert(found: list[BatchNormalization], group: Group) -> None:
    for link in found:
        # Chainer's link keeps all it has in attributes.
        link.__class__ = GroupedBatchNormalization
        link.group = group
