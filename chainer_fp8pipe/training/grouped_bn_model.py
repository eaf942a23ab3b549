"""A model whose batch normalisation is that of groups of ranks."""
from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from typing import Any

import chainer
from chainer.links import BatchNormalization
from chainermn.links import MultiNodeBatchNormalization

from ..links.divisible import Divisible
from ..links.grouped_bn import GroupedBatchNormalization
from ..mpi.agreement import agree, raise_together
from ..mpi.grid import group_of, ranks_of
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
    group = group_of(ranks, group_size)
    result, found = raise_together(ranks, lambda: _copied(model), ValueError)
    agree(ranks, {
        f'batch normalisation {number} (called {link.name})':
        f'of size {link.avg_mean.shape}' if link.avg_mean is not None
        else f'over axis {link.axis}'
        for number, link in enumerate(found)},
        remedy='All ranks must have copies of one model, or the same stage of '
        'a pipeline')
    for link in found:
        # Chainer's link keeps all it has in attributes.
        link.__class__, link.group = GroupedBatchNormalization, group
    return result


def _copied(model: Any) -> tuple[Any, list[Any]]:
    """A deep copy, and what in it is to be converted."""
    memo: dict[int, Any] = {}
    if not isinstance(model, (chainer.Link, list, tuple, dict)):
        raise ValueError(f'the model is {model!r}; it must be a link')
    result = copy.deepcopy(model, memo)
    # Here is all that was copied, in whatever it is held, each thing once.
    found = [thing for thing in memo.values() if isinstance(
        thing, (BatchNormalization, MultiNodeBatchNormalization))]
    for link in found:
        if type(link) not in (BatchNormalization, GroupedBatchNormalization):
            raise ValueError(
                f'a {type(link).__name__} (called {link.name}) cannot be '
                'grouped, only BatchNormalization itself; replace it in the '
                'model')
    del memo[id(memo)]      # the originals
    for thing in memo.values():
        for one in (thing.values() if isinstance(thing, dict) else thing
                    if isinstance(thing, (list, tuple)) else [thing]):
            _check_function(one)
    return result, found


def _check_function(value: Any) -> None:
    """Refuses a function, which is not copied, that finds a link by name."""
    while isinstance(value, functools.partial):
        value = value.func
    if not isinstance(value, (type, chainer.Link, types.FunctionType)):
        value = vars(type(value)).get('__call__')
    if isinstance(value, types.FunctionType):
        found = [*(value.__defaults__ or ()),
                 *(value.__kwdefaults__ or {}).values()]
        with contextlib.suppress(ValueError):   # no value there yet
            names = inspect.getclosurevars(value)
            found += [*names.nonlocals.values(), *names.globals.values()]
        for one in found:
            # A function may refer to its model.
            for link in one.links() if isinstance(
                    one, chainer.Link) and not isinstance(
                        one, Divisible) else ():
                if isinstance(link, BatchNormalization):
                    raise ValueError(
                        f'a {type(link).__name__} (called {link.name}) is '
                        'held by a function that cannot be copied; make it a '
                        'layer, or an attribute of a link')
