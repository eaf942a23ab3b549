"""All that one rank must have back for an exact continuation.

What a trainer serializes is not enough: Chainer leaves out much of the
optimizers (:mod:`.optimizer_state`) and the generators of random numbers, and
it knows nothing of a communicator's residuals.

A state is a flat dictionary of arrays.  Keys below ``trainer/`` are what
Chainer's serializer calls them; ``optimizer/``, ``communicator/`` and
``random/`` are this module's.
"""
from __future__ import annotations

import random
from typing import Any

import chainer
import numpy

from .optimizer_state import State, collect_optimizers, restore_optimizers

_MODEL = 'trainer/updater/model:'


def collect(trainer: chainer.training.Trainer, comm: Any) -> State:
    """This rank's state."""
    return {**_prefixed('trainer/', _trainer(trainer)),
            **_prefixed('optimizer/', collect_optimizers(trainer)),
            **_prefixed('communicator/', comm.state()
                        if hasattr(comm, 'state') else {}),
            **_prefixed('random/', _random())}


def restore(state: State, trainer: chainer.training.Trainer,
            comm: Any) -> None:
    """Takes over what :func:`collect` gave."""
    # Not strict: an optimizer that had not updated a parameter yet has
    # nothing to say of it; what must be there was checked before.
    deserializer = chainer.serializers.NpzDeserializer(state, strict=False)
    trainer.serialize(deserializer['trainer'])
    restore_optimizers(below('optimizer/', state), trainer)
    if hasattr(comm, 'load_state'):
        comm.load_state(below('communicator/', state))
    _restore_random(below('random/', state))


def incompatible(saved: State, current: State) -> str:
    """Why ``saved`` cannot be restored; '' if it can.

    Nothing is restored before this is known: a trainer that is half one run
    and half another would go on without a complaint.
    """
    for key in current:
        if key.startswith('trainer/') and key not in saved:
            return (f'{_name(key)} is not in the snapshot; build the trainer '
                    'as it was, with the same extensions')
    for key, value in below('optimizer/', current).items():
        if key.endswith('/class'):
            was = saved.get(f'optimizer/{key}')
            if was != value:
                return (f'optimizer {key.partition("/")[0]!r} is {value}, in '
                        f'the snapshot it is {was}')
    for key, value in saved.items():
        if key.startswith(_MODEL):
            if key not in current:
                return f'the snapshot has {_name(key)}, the model has not'
            now = current[key]
            if (now.dtype != object and value.dtype != object
                    and (now.shape, now.dtype) != (value.shape, value.dtype)):
                return (f'{_name(key)} is {value.dtype} {value.shape} in the '
                        f'snapshot but {now.dtype} {now.shape} in the model')
    return ''


def below(prefix: str, state: State) -> State:
    """The part of a state whose keys start with ``prefix``, without it."""
    return {key[len(prefix):]: value for key, value in state.items()
            if key.startswith(prefix)}


def _prefixed(prefix: str, state: State) -> State:
    return {prefix + key: value for key, value in state.items()}


def _name(key: str) -> str:
    if key.startswith(_MODEL):
        return 'parameter /' + key[len(_MODEL):].partition('/')[2]
    return key


def _trainer(trainer: chainer.training.Trainer) -> State:
    serializer = chainer.serializers.DictionarySerializer()
    try:
        trainer.serialize(serializer)
    except RuntimeError:
        # The last thing it writes is the time since its start; one that has
        # not started raises there.
        if trainer._start_at is not None:
            raise
        serializer('_snapshot_elapsed_time', 0.0)
    return {key: numpy.asarray(value)
            for key, value in serializer.target.items()}


def _random() -> State:
    """Of NumPy's and Python's global generators, which Chainer draws from.

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
