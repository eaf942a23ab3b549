"""The state of one rank, complete for an exact continuation."""
# A trainer's own serialization is not enough: Chainer leaves out much of the
# optimizers (optimizers.py), the generators of random numbers, and a
# communicator's residuals.
#
# A state is a flat dictionary of arrays.  Keys below ``trainer/`` are what
# Chainer's serializer calls them; ``optimizer/``, ``communicator/``,
# ``iterator/`` and ``random/`` are this module's.  A parameter has the same
# keys on every rank, so its state can move to other ranks.  What is below
# ``communicator/`` is of one rank in one layout, and what is below
# ``random/`` of one rank: they cannot.
#
# Whether a snapshot fits is found out before anything is changed (missing,
# incompatible), and what changes is kept (undoing): a trainer that is half one
# run and half another would go on without a complaint.
#
# What a rank takes of a snapshot (wishes): in the layout that it is of, what
# the same rank had.  In another one, of model and optimizers what its own
# parameters need, from the first rank that had it; of iterators and random
# numbers what it had itself, and the first rank's iterators if it was not
# there; nothing of communicators; and the first rank's value of all else.
from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import chainer
import numpy

from .file import SnapshotIndex, State, object_array
from .gather import FIRST, NOTHING, OWN
from .optimizers import (
    Difference,
    attributes_of,
    below,
    classes_differ,
    collect_optimizers,
    owners,
    parameter_of,
    restore_optimizers,
)

MODEL = 'trainer/updater/model:'
_RANDOM = 'random/'
_ITERATOR = 'trainer/updater/iterator:'
_OPTIMIZER = 'trainer/updater/optimizer:'


def collect(trainer: chainer.training.Trainer, comm: Any) -> State:
    """This rank's state; ``comm`` is the argument of ``Snapshot``."""
    parts = {'trainer/': _trainer(trainer),
             'optimizer/': collect_optimizers(trainer),
             'iterator/': _lengths(trainer), _RANDOM: _random()}
    for prefix, communicator, model in _stateful(trainer, comm):
        parts[prefix] = communicator.state(model)
    return {prefix + key: value for prefix, part in parts.items()
            for key, value in part.items()}


def restore(state: State, trainer: chainer.training.Trainer, comm: Any
            ) -> list[Difference]:
    """Restores the state of :func:`collect`, or a part of one.

    Args:
        state: Arrays that were copied are replaced in it by their copies, so
            that no more memory is taken.
        trainer: Whose state it is.
        comm: As for :func:`collect`.

    Returns:
        As :func:`restore_optimizers`.
    """
    trainer.serialize(_Deserializer(state, trainer)['trainer'])
    differences = restore_optimizers(below('optimizer/', state), trainer)
    for prefix, communicator, model in _stateful(trainer, comm):
        if own := below(prefix, state):
            communicator.load_state(own, model)
    if numbers := below(_RANDOM, state):
        _restore_random(numbers)
    return differences


def undoing(trainer: chainer.training.Trainer, comm: Any, state: State
            ) -> Callable[[], None]:
    """What makes all that a resume may change as it is now.

    Args:
        trainer: Whose state may change.
        comm: As for :func:`collect`.
        state: Of :func:`collect`.
    """
    before = {key: value.copy() for key, value in state.items()
              if not key.startswith('communicator/')}
    communicators = [(communicator, communicator.state(model), model)
                     for _, communicator, model in _stateful(trainer, comm)]
    optimizers = trainer.updater.get_all_optimizers().values()
    # What serializers do not put back: attributes, such as the state of an
    # update rule that had none, and what is in containers.
    attributes = [vars(one) for one in (
        trainer, trainer.updater, trainer.stop_trigger,
        *(part for entry in trainer._extensions.values()
          for part in (entry.extension, entry.trigger)),
        *(part for optimizer in optimizers for part in (
            *optimizer.target.links(), *optimizer.target.params())))
        if hasattr(one, '__dict__')] + [
            part for _, owner in owners(trainer)
            for part in attributes_of(owner).values()]
    contents = [(container, copy.copy(container)) for part in attributes
                for container in (part, *part.values())
                if type(container) in (list, dict)]

    def undo() -> None:
        # It fails where it has failed before, and has changed nothing beyond.
        with contextlib.suppress(Exception):
            restore(before, trainer, None)
        _restore_random(below(_RANDOM, before))
        for container, content in contents:
            container.clear()
            getattr(container, 'update' if isinstance(container, dict)
                    else 'extend')(content)
        for communicator, own, model in communicators:
            with contextlib.suppress(Exception):    # it was not changed
                communicator.load_state(own, model)
    return undo


class _Serializer(chainer.serializers.DictionarySerializer):
    """Chainer's, which also takes lists and dictionaries."""

    def __getitem__(self, key: str) -> Any:
        return _Serializer(self.target, f'{self.path}{key.strip("/")}/')

    def __call__(self, key: str, value: Any) -> Any:
        name = self.path + key.lstrip('/')
        try:
            super().__call__(key, value)
            self.target[name] = numpy.asarray(self.target[name])
        except (TypeError, ValueError):     # an error names it if it is not
            self.target[name] = numpy.asarray(None)
        if self.target[name].dtype == object:
            self.target[name] = object_array(value)
        return value


class _Deserializer(chainer.serializers.NpzDeserializer):
    """Chainer's, which also loads persistent values that have changed.

    Chainer refuses a number in place of an integer, an array of another
    shape, and what is neither array, number nor text.
    """

    # Not strict: an optimizer that had not updated a parameter yet has no
    # state of it; necessary keys were checked before.
    def __init__(self, state: State, trainer: chainer.training.Trainer
                 ) -> None:
        super().__init__(state, strict=False)
        self._parameters = parameters_of_model(trainer)

    def __getitem__(self, key: str) -> Any:
        child = copy.copy(self)
        child.path = f'{self.path}{key.strip("/")}/'
        return child

    def __call__(self, key: str, value: Any) -> Any:
        name = self.path + key.lstrip('/')
        saved = self.npz.get(name)
        if saved is None:
            return value
        if saved.dtype == object:
            return saved.item()
        try:
            if not isinstance(value, chainer.get_array_types()):
                return super().__call__(key, value)
            super().__call__(key, value)
            if isinstance(value, numpy.ndarray):
                self.npz[name] = value
            return value
        except (TypeError, ValueError):
            if not name.startswith(MODEL) or name in self._parameters:
                raise
        if isinstance(value, chainer.get_array_types()):
            return chainer.backend.get_device_from_array(value).send(saved)
        return saved if saved.shape else saved.item()


# --- whether a state fits ----------------------------------------------------

def names_of_communicators(trainer: chainer.training.Trainer, comm: Any
                           ) -> str:
    """The names of the job's communicators, as a snapshot has them.

    Of ``comm``, and of multi-node optimizers.
    """
    found = [comm] if hasattr(comm, 'mpi_comm') else []
    for optimizer in trainer.updater.get_all_optimizers().values():
        communicator = getattr(optimizer, 'communicator', None)
        if communicator is not None and not any(
                communicator is other for other in found):
            found.append(communicator)
    return ', '.join(
        getattr(communicator, 'name', type(communicator).__name__)
        for communicator in found) or 'none'


def layout(keys: Collection[str]) -> set[str]:
    """The keys of the model and of the updater's own values.

    Two ranks with equal ones do the same part of the same job.
    """
    return {key for key in keys if key.startswith(MODEL) or _of_updater(key)}


def parameters_of_model(trainer: chainer.training.Trainer) -> set[str]:
    """The keys of this rank's parameters."""
    return {f'{MODEL}{name}{place}'
            for name, optimizer in trainer.updater.get_all_optimizers().items()
            for place, _ in optimizer.target.namedparams()}


def wishes(index: SnapshotIndex, rank: int, exact: bool, current: State,
           trainer: chainer.training.Trainer) -> numpy.ndarray:
    """What a rank takes of each of a snapshot's keys.

    Args:
        index: Of the snapshot.
        rank: This one.
        exact: Whether the layout is the snapshot's.
        current: This rank's state.
        trainer: Whose state it is.

    Returns:
        Numbers, as for :func:`.gather.read`.
    """
    own = index.of_rank(rank)
    parameters = {'', *(key.removeprefix(MODEL)
                        for key in parameters_of_model(trainer))}

    def wish(key: str) -> int:
        if exact or key.startswith(_RANDOM):
            return OWN if key in own else NOTHING
        if key.startswith((_ITERATOR, 'iterator/')):
            return OWN
        is_here = key.startswith('trainer/')
        if key.startswith(MODEL):
            is_here = key in current
        for prefix in _OPTIMIZER, 'optimizer/':
            if key.startswith(prefix):
                is_here = parameter_of(
                    key.removeprefix(prefix)) in parameters
        return FIRST if is_here else NOTHING
    return numpy.array([wish(key) for key in index.owners], numpy.int8)


def with_iterators(saved: State, current: State, index: SnapshotIndex,
                   rank: int) -> tuple[State, str]:
    """A state of another layout, whose iterators fit this one.

    Where an iterator has another number of samples than it had, such as the
    share of one of two ranks in place of four, it goes on at the same share
    of its epoch.  An order goes on if it is of as many samples, and this
    rank's, or was that of all; otherwise the iterator keeps the one that it
    has drawn.

    Returns:
        The state, and a sentence about what is another; '' if nothing is.
    """
    state, changed = dict(saved), ''
    for key, length in below('iterator/', current).items():
        name = key.partition('/')[0]
        was = saved.get(f'iterator/{key}')
        order, place = (f'{_ITERATOR}{name}/{what}'
                        for what in ('order', 'current_position'))
        if order in current and order in saved and (
                saved[order].shape != current[order].shape
                or not (rank in index.owners[order]
                        or index.is_same_everywhere(order))):
            state[order] = current[order]
            changed += f', iterator {name!r} in an order of its own'
        if was is not None and was != length and place in saved:
            state[place] = numpy.asarray(
                saved[place] * length // max(was, 1))
            changed += (f', iterator {name!r} at the same share of its '
                        f'epoch, of {length} samples in place of {was}')
    return state, changed


def missing(saved: Collection[str], current: State, exact: bool) -> str:
    """The error about a key that a snapshot lacks; '' if none.

    ``saved`` are the keys that this rank would get.  If the layout is not
    exactly that of the snapshot, the updater may have other values.
    """
    lacks = [key for key in current
             if key.startswith('trainer/') and key not in saved
             and (exact or not _of_updater(key))]
    lacks.sort(key=lambda key: not key.startswith(MODEL))    # the model first
    if not lacks:
        return ''
    return f'{describe(lacks[0])} is not in the snapshot; build the ' + (
        'model as it was' if lacks[0].startswith(MODEL) else
        'trainer as it was, with the same extensions')


def incompatible(saved: State, current: State,
                 trainer: chainer.training.Trainer) -> str:
    """Why ``saved`` cannot be restored; '' if it can."""
    parameters = parameters_of_model(trainer)
    for key, value in sorted(saved.items(), key=lambda item: item[0]):
        now = current.get(key)
        if now is None or now.dtype == object or value.dtype == object:
            continue
        if key in parameters and (now.shape, now.dtype) != (
                value.shape, value.dtype):
            return (f'{describe(key)} is {value.dtype} {value.shape} in the '
                    f'snapshot but {now.dtype} {now.shape} in the model')
        if key.startswith(_ITERATOR) and now.shape != value.shape:
            return (f'{describe(key)} has shape {value.shape} in the snapshot '
                    f'but {now.shape} here; use the same data set')
    return classes_differ(below('optimizer/', saved),
                          below('optimizer/', current))


def describe(key: str) -> str:
    """The name of a key in messages."""
    if key.startswith(MODEL):
        return 'parameter /' + key[len(MODEL):].partition('/')[2]
    return key


def _of_updater(key: str) -> bool:
    """Whether this is an updater's own value, such as ``iteration``."""
    return key.startswith('trainer/updater/') and ':' not in key


# --- the parts of a state ----------------------------------------------------

def _stateful(trainer: chainer.training.Trainer, comm: Any
              ) -> Iterator[tuple[str, Any, chainer.Link]]:
    """Communicators that have a state, its prefix, and of which model."""
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        communicator = getattr(optimizer, 'communicator', comm)
        if hasattr(communicator, 'state'):
            yield f'communicator/{name}/', communicator, optimizer.target


def _trainer(trainer: chainer.training.Trainer) -> State:
    serializer, started = _Serializer(), trainer._start_at
    if started is None:     # a trainer's own raises then
        trainer._start_at = 0.0
    try:
        trainer.serialize(serializer)
    finally:
        trainer._start_at = started
    if started is None:
        serializer('_snapshot_elapsed_time', trainer._snapshot_elapsed_time)
    return serializer.target


def _lengths(trainer: chainer.training.Trainer) -> State:
    """Numbers of samples of this rank's iterators."""
    found = {}
    # Updaters of one's own may keep them elsewhere.
    for name, iterator in getattr(trainer.updater, '_iterators', {}).items():
        with contextlib.suppress(Exception):    # not all know it
            found[f'{name}/samples'] = numpy.asarray(len(iterator.dataset))
    return found


def _random() -> State:
    """The state of NumPy's and Python's global generators.

    CuPy's generators cannot be read; dropout on a GPU goes on with other
    masks.
    """
    _, keys, position, has_gauss, cached = numpy.random.get_state()
    _, words, gauss = random.getstate()
    return {'numpy_keys': numpy.asarray(keys),
            'numpy_rest': numpy.array([position, has_gauss, cached]),
            'python_words': numpy.array(words, numpy.uint32),
            'python_gauss': numpy.array(
                numpy.nan if gauss is None else gauss)}


def _restore_random(state: State) -> None:
    position, has_gauss, cached = state['numpy_rest'].tolist()
    numpy.random.set_state(('MT19937', state['numpy_keys'], int(position),
                            int(has_gauss), cached))
    gauss = state['python_gauss'].item()
    random.setstate((3, tuple(state['python_words'].tolist()),
                     None if numpy.isnan(gauss) else gauss))
