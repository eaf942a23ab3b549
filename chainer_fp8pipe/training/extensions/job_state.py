"""The state of one rank, complete for an exact continuation.

A trainer's own serialization is not enough: Chainer leaves out much of the
optimizers (:mod:`.optimizer_state`), the generators of random numbers, and a
communicator's residuals.

A state is a flat dictionary of arrays.  Keys below ``trainer/`` are what
Chainer's serializer calls them; ``optimizer/``, ``communicator/`` and
``random/`` are this module's.  A parameter has the same keys on
every rank, so that its state can move to other ranks; the state below
``communicator/`` and ``random/`` is of one rank in one layout, and cannot.
"""
from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import chainer
import numpy

from .optimizer_state import (
    State,
    below,
    collect_optimizers,
    parameter_of,
    restore_optimizers,
)

MODEL = 'trainer/updater/model:'
_ITERATOR = 'trainer/updater/iterator:'
_OPTIMIZER = 'trainer/updater/optimizer:'


def collect(trainer: chainer.training.Trainer, comm: Any) -> State:
    """This rank's state; ``comm`` is the argument of ``Snapshot``."""
    parts = {'trainer/': _trainer(trainer),
             'optimizer/': collect_optimizers(trainer), 'random/': _random()}
    for prefix, communicator in _stateful(trainer, comm):
        parts[prefix] = communicator.state()
    return {prefix + key: value for prefix, part in parts.items()
            for key, value in part.items()}


def restore(state: State, trainer: chainer.training.Trainer,
            comm: Any) -> None:
    """Restores the state of :func:`collect`, or a part of one."""
    # Not strict: an optimizer that had not updated a parameter yet has no
    # state of it; necessary keys were checked before.
    deserializer = chainer.serializers.NpzDeserializer(state, strict=False)
    trainer.serialize(deserializer['trainer'])
    restore_optimizers(below('optimizer/', state), trainer)
    for prefix, communicator in _stateful(trainer, comm):
        if own := below(prefix, state):
            communicator.load_state(own)
    if numbers := below('random/', state):
        _restore_random(numbers)


def communicators(trainer: chainer.training.Trainer, comm: Any) -> list[Any]:
    """The communicators of ``comm`` and of multi-node optimizers."""
    found = [comm] if hasattr(comm, 'mpi_comm') else []
    for optimizer in trainer.updater.get_all_optimizers().values():
        # ChainerMN's multi-node optimizer has one.
        communicator = getattr(optimizer, 'communicator', None)
        if communicator is not None and not any(
                communicator is other for other in found):
            found.append(communicator)
    return found


def names_of_communicators(trainer: chainer.training.Trainer, comm: Any
                           ) -> str:
    """The names of the job's communicators, as a snapshot has them."""
    names = [getattr(communicator, 'name', type(communicator).__name__)
             for communicator in communicators(trainer, comm)]
    return ', '.join(names) or 'none'


def layout(keys: Collection[str]) -> set[str]:
    """The keys of the model and of the updater's own values.

    Two ranks with equal ones do the same part of the same job.
    """
    return {key for key in keys if key.startswith(MODEL) or _of_updater(key)}


def movable(keys: Collection[str], current: State,
            trainer: chainer.training.Trainer) -> list[str]:
    """The keys that this rank takes from a snapshot of another layout.

    ``keys`` are all of the snapshot; ``current`` is this rank's state.  Of
    model and optimizer, those of this rank's parameters are taken.
    """
    parameters = {
        name + place
        for name, optimizer in trainer.updater.get_all_optimizers().items()
        for place, _ in optimizer.target.namedparams()}

    def is_wanted(key: str) -> bool:
        if key.startswith(MODEL):
            return key in current
        if key.startswith(_OPTIMIZER):
            owner = key[len(_OPTIMIZER):].rpartition('/')[0]
            return '/' not in owner or owner in parameters
        if key.startswith('optimizer/'):
            owner = parameter_of(key[len('optimizer/'):])
            return not owner or owner in parameters
        return key.startswith('trainer/')
    return [key for key in keys if is_wanted(key)]


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


def incompatible(saved: State, current: State) -> str:
    """Why ``saved`` cannot be restored; '' if it can.

    Nothing is restored before this is known: a trainer that is half one run
    and half another would go on without a complaint.
    """
    for key, value in below('optimizer/', current).items():
        if key.endswith('/class'):
            was = saved.get(f'optimizer/{key}')
            if was != value:
                return (f'optimizer {key.partition("/")[0]!r} is {value}, in '
                        f'the snapshot it is {was}')
    for key, value in sorted(saved.items(), key=lambda item: item[0]):
        now = current.get(key)
        if now is None or now.dtype == object or value.dtype == object:
            continue
        if key.startswith(MODEL) and (now.shape, now.dtype) != (
                value.shape, value.dtype):
            return (f'{describe(key)} is {value.dtype} {value.shape} in the '
                    f'snapshot but {now.dtype} {now.shape} in the model')
        if key.startswith(_ITERATOR) and now.shape != value.shape:
            return (f'{describe(key)} has shape {value.shape} in the snapshot '
                    f'but {now.shape} here; use the same data set, and '
                    'ReplicaIterator for another number of replicas')
    return ''


def describe(key: str) -> str:
    """The name of a key in messages."""
    if key.startswith(MODEL):
        return 'parameter /' + key[len(MODEL):].partition('/')[2]
    return key


def _of_updater(key: str) -> bool:
    """Whether this is an updater's own value, such as ``iteration``."""
    return key.startswith('trainer/updater/') and ':' not in key


class _Exchange(NamedTuple):
    """What a communicator knows of an optimizer's model."""

    communicator: Any
    model: chainer.Link

    def state(self) -> State:
        return self.communicator.state(self.model)

    def load_state(self, state: State) -> None:
        self.communicator.load_state(state, self.model)


def _stateful(trainer: chainer.training.Trainer, comm: Any
              ) -> Iterator[tuple[str, _Exchange]]:
    """Exchanges that have a state, with the prefix of its keys."""
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        communicator = getattr(optimizer, 'communicator', comm)
        if hasattr(communicator, 'state'):
            yield (f'communicator/{name}/',
                   _Exchange(communicator, optimizer.target))


def _trainer(trainer: chainer.training.Trainer) -> State:
    serializer = chainer.serializers.DictionarySerializer()
    try:
        trainer.serialize(serializer)
    except RuntimeError:
        # A trainer writes the time since its start last, and raises there
        # if it has not started.
        if trainer._start_at is not None:
            raise
        serializer('_snapshot_elapsed_time', 0.0)
    return {key: numpy.asarray(value)
            for key, value in serializer.target.items()}


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
