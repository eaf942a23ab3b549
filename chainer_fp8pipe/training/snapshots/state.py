"""The state of one rank, complete for an exact continuation."""
# A state is a flat dictionary of arrays.  Its keys are what Chainer calls
# them, or below ``job/`` what Chainer's serializers leave out.  Of optimizers,
# rules and hooks all attributes are kept that JSON with arrays in it can hold;
# of the script's own classes those that the training has changed, as others
# may be of the rank or folder.  What it has changed and cannot be kept is
# named in a warning.
from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import json
import math
import pickle
import random
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import chainer
import numpy
from chainer import training
from chainer.training.trainer import _ExtensionEntry, _get_time
from chainer.training.triggers import EarlyStoppingTrigger, TimeTrigger

from ...chains.saving import saving_parts
from ...intercept.training_objects import LIBRARIES
from ...pipeline.randomness import preserved
from .file import NONE, Manifest, State, as_json

MODEL, _ITERATOR, _OPTIMIZER = (
    'updater/model:', 'updater/iterator:', 'updater/optimizer:')
_RANDOM, _LENGTH, _KEPT = (
    'job/random', 'job/iterator/length of ', 'job/optimizer/')
#: In keys of optimizers and rules, which no other class goes on with.
_CLASS = '/class '
#: What only a run in the same layout goes on with, and what tells layouts.
_EXACT, _LAYOUT = 'job/exact/', 'job/exact/layout/'
_STOP = 'stop_trigger'
#: What the last snapshot has not: a run that goes on asks its stop trigger
#: again.
NOT_LAST = f'{_STOP}/', f'job/stopping/{_STOP}/_max_', 'job/trainer'
_CONTAINERS: Any = {'list': list, 'tuple': tuple, 'dict': dict,
                    'Variable': lambda array: chainer.Variable(*array)}
#: Packages whose objects, and what derives from them, are values; and those
#: whose other objects are none, as those of the script are.
_VALUES = {'collections', 'cupy', 'numpy', 'random'}
_NO_VALUES = {*LIBRARIES, *sys.stdlib_module_names}
_COMPARED = (int, float, complex, str, bytes, bytearray, list, tuple, dict,
             set, frozenset, chainer.Link, chainer.Variable)
_NUMBERS = int, float, numpy.generic
#: Random generators: how to get their state and to set it.
_STATES: dict[Any, tuple[str, str]] = {
    random.Random: ('getstate', 'setstate'),
    numpy.random.RandomState: ('get_state', 'set_state')}


# --- Python's values as JSON and arrays --------------------------------------

def _array_of(value: Any, key: str) -> numpy.ndarray:
    """What NumPy's files can hold; TypeError: it is something else."""
    array = numpy.asarray(chainer.backends.cuda.to_cpu(value))
    if array.dtype.hasobject or numpy.dtype(array.dtype.str) != array.dtype:
        raise TypeError(f'{key} cannot be saved; serialize arrays, numbers '
                        'and texts')
    return array


def _pack(value: Any, key: str, arrays: State) -> Any:
    """What JSON holds; arrays in it get keys of their own."""
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if type(value) in (list, tuple, dict, chainer.Variable):
        return [type(value).__name__, *(_pack(one, key, arrays) for one in (
            value.items() if isinstance(value, dict) else [value.array]
            if isinstance(value, chainer.Variable) else value))]
    arrays[place := f'{key}#{len(arrays)}'] = _array_of(value, key)
    return ['array', place, isinstance(value, numpy.generic),
            isinstance(value, numpy.ndarray)]


def _unpack(packed: Any, state: State, device: Any) -> Any:
    if not isinstance(packed, list):
        return packed
    kind, *values = packed
    if kind != 'array':
        return _CONTAINERS[kind](
            _unpack(one, state, device) for one in values)
    key, is_number, is_numpys = values
    return state[key][()] if is_number else (
        state[key] if is_numpys else device.send(state[key]))


# --- what is kept besides what Chainer saves ---------------------------------

def _owners(trainer: training.Trainer) -> Iterator[tuple[str, Any]]:
    """Objects whose attributes are kept, by their keys."""
    for main, optimizer in trainer.updater.get_all_optimizers().items():
        # ChainerMN's proxy has the real one inside.
        owners = {main: getattr(optimizer, 'actual_optimizer', optimizer), **{
            main + place: one.update_rule
            for place, one in optimizer.target.namedparams()
            if one.update_rule is not None}}
        for key, owner in owners.items():
            yield f'{_KEPT}{key}{_CLASS}{type(owner).__name__}', owner
            yield f'{_KEPT}{key}/hyperparam', owner.hyperparam
            for name, hook in (*owner._hookable._pre_update_hooks.items(),
                               *owner._hookable._post_update_hooks.items()):
                # One that another one calls, or whose method is called.
                hook = getattr(hook, '_hook', hook)
                yield (f'{_KEPT}{key}/hook {name.replace("/", ":")}',
                       getattr(hook, '__self__', hook))
        for place, link in optimizer.target.namedlinks():
            # As L.LSTM, which knows the last batch of this rank.
            is_ranks = hasattr(link, 'reset_state')
            yield f'{_RANDOM if is_ranks else "job/link"}/{main}{place}', link
            if is_ranks:
                yield f'{_EXACT}link/{main}{place}', link
    yield _RANDOM, types.SimpleNamespace(
        numpy=numpy.random.mtrand._rand, python=random._inst, **dict(
            itertools.chain(*itertools.starmap(
                _generators, _iterators(trainer)))))
    for key, one in (
            ('updater/own', trainer.updater),
            *((f'iterator/{name}', one)
              for name, one in _iterators(trainer)),
            *((f'trigger of/{name}', one) for name, one in _triggers(trainer)),
            *((f'extension/{name}', inspect.unwrap(entry.extension))
              for name, entry in trainer._extensions.items())):
        one = getattr(one, '__self__', one)
        # Chainer has no serialize() for this one.
        if not _is_librarys(one) or isinstance(one, EarlyStoppingTrigger):
            yield f'job/{key}', one
    yield 'job/trainer', trainer


def _generators(name: str, owner: Any) -> Iterator[tuple[str, Any]]:
    """Random generators in an iterator, and in what it takes its data of."""
    for key, value in getattr(owner, '__dict__', {}).items():
        if type(value) in _STATES:
            yield f'{name} {key}', value
        elif key in ('order_sampler', 'dataset', '_dataset', '_transform'):
            yield from _generators(f'{name} {key}',
                                   getattr(value, '__self__', value))


def _iterators(trainer: training.Trainer) -> Iterator[tuple[str, Any]]:
    for name, one in getattr(trainer.updater, '_iterators', {}).items():
        # One that divides batches has the script's own.
        yield name, getattr(one, '_own', None) or one


def _triggers(trainer: training.Trainer) -> Iterator[tuple[str, Any]]:
    """All triggers, by the extension's name or ``_STOP``."""
    yield _STOP, inspect.unwrap(trainer.stop_trigger)
    for name, entry in trainer._extensions.items():
        yield name, inspect.unwrap(entry.trigger)


def _is_librarys(one: Any) -> bool:
    return str(getattr(one, '__module__', '')).partition('.')[0] in LIBRARIES


def _attributes(key: str, owner: Any) -> dict[str, Any]:
    """Those that may be kept; of random generators the state."""
    found, elsewhere = dict(getattr(owner, '__dict__', {})), set[str]()
    if isinstance(owner, chainer.Link):     # all else may be of a batch
        found = {name: value for name, value in found.items() if (
            type(value) is chainer.Variable if key.startswith(_EXACT)
            else isinstance(value, (*_NUMBERS, *_STATES)))}
    elif isinstance(owner, training.Trainer):
        # What its stop trigger may look at.
        found = {'observation': {
            name: value for name, value in owner.observation.items()
            if isinstance(value, (*_NUMBERS, chainer.Variable,
                                  *chainer.get_array_types()))}}
    elif isinstance(owner, chainer.dataset.Iterator):
        elsewhere = {'dataset', '_state'}
    elif isinstance(owner, (chainer.Optimizer, chainer.UpdateRule)):
        elsewhere = {'t', 'epoch', 'target', '_state', '_parent'}
        if (copy := found.get('_fp32_param')) is not None:
            found['_fp32_param'] = copy.array
    return {name: getattr(value, _STATES[type(value)][0])()
            if type(value) in _STATES else value
            for name, value in found.items() if name not in elsewhere}


class _Fingerprints(pickle.Pickler):
    """Makes numbers that change when values do; others are only told apart.

    What the trainer saves by itself is no value, wherever it is.
    """

    def __init__(self, trainer: training.Trainer) -> None:
        self._saved = {id(one) for optimizer
                       in trainer.updater.get_all_optimizers().values()
                       for one in (*optimizer.target.links(),
                                   *optimizer.target.params())}

    def of(self, value: Any) -> int:
        homes = {kind.__module__.partition('.')[0]
                 for kind in type(value).__mro__[:-1]}
        if isinstance(value, _COMPARED) or homes & _VALUES or not (
                homes & _NO_VALUES):
            with contextlib.suppress(Exception):    # of an object in it
                super().__init__(file := io.BytesIO())
                self.dump(value)
                return hash(file.getvalue())
        return id(value)

    def persistent_id(self, one: Any) -> int | None:
        return id(one) if id(one) in self._saved or isinstance(one, (
            chainer.Optimizer, chainer.dataset.Iterator, training.Extension,
            training.Trainer, training.Updater)) else None


#: By trainer: of which a snapshot was taken, or which went on from one.
beginnings: weakref.WeakKeyDictionary[Any, dict[str, dict[str, int]]] = (
    weakref.WeakKeyDictionary())


def note_beginning(trainer: training.Trainer) -> dict[str, dict[str, int]]:
    """Notes what attributes are before a trainer runs or is resumed.

    The first call counts, for each object that may have been added since.
    """
    first, fingerprint = beginnings.setdefault(
        trainer, {}), _Fingerprints(trainer).of
    for key, owner in _owners(trainer):
        if key not in first:
            first[key] = {name: fingerprint(value)
                          for name, value in _attributes(key, owner).items()}
    return first


def _keep(trainer: training.Trainer) -> tuple[State, list[str]]:
    """Attributes that Chainer does not save; and the names of the others."""
    first, state, left_out = note_beginning(trainer), State(), []
    fingerprint = _Fingerprints(trainer).of
    for key, owner in _owners(trainer):
        kept, arrays, is_whole = {}, State(), (
            key.startswith((_RANDOM, _KEPT, _EXACT)))
        for name, value in _attributes(key, owner).items():
            try:
                if is_whole or first[key].get(name) != fingerprint(value):
                    kept[name] = _pack(value, key, arrays)
            except (TypeError, RecursionError):     # it has itself
                if first[key].get(name) != fingerprint(value) and (
                        not _is_librarys(owner)):
                    left_out.append(
                        f'{name} of {key[4:].replace("/", " ", 1)}, a '
                        f'{type(value).__name__}')
        if kept or is_whole:
            state |= {key: as_json(kept), **arrays}
    return state, left_out


def _restore_kept(state: State, trainer: training.Trainer) -> None:
    device = next(iter(
        trainer.updater.get_all_optimizers().values())).target.device
    script: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for key, owner in _owners(trainer):
        kept = json.loads(state[key].tobytes()) if key in state else {}
        attributes = vars(owner)
        if key.startswith(_KEPT):
            script.append((attributes, {
                name: attributes[name] for name in kept if name in attributes
                }))
        for name, packed in kept.items():
            value, old = _unpack(packed, state, device), attributes.get(name)
            if type(old) in _STATES:
                getattr(old, _STATES[type(old)][1])(value)
            elif type(old) is type(value) and isinstance(old, (list, dict)):
                # The script may have other names of it.
                old.clear()
                (old.extend if isinstance(old, list) else old.update)(value)
            else:
                attributes[name] = chainer.Parameter(value) if (
                    name == '_fp32_param' and value is not None) else value

    def swap(_: Any) -> None:
        for attributes, others in script:
            for name, other in others.items():
                others[name] = attributes.get(name)
                attributes[name] = other
    # Extensions find the script's values where a training goes on:
    # ``ExponentialShift`` takes the rate that it finds for the first one.
    for what, priority in ('first', math.inf), ('last', -math.inf):
        trainer._extensions[f"the script's values {what}"] = _ExtensionEntry(
            training.make_extension(initializer=swap)(lambda _: None),
            priority, lambda _: False, False)


# --- all of it ---------------------------------------------------------------

def collect(trainer: training.Trainer, comm: Any) -> tuple[State, list[str]]:
    """This rank's state, and what the training changes that is not in it.

    TypeError names what cannot be saved.  ``comm`` is as for ``Snapshot``.
    """
    if trainer._start_at is None:       # which is set when it runs
        trainer._start_at = _get_time()
    serializer, state = chainer.serializers.DictionarySerializer(), State()
    _serialize(trainer, serializer)
    for key, value in serializer.target.items():
        array = numpy.asarray(value)
        state[key] = NONE if array.dtype == object and (
            array[()] is None) else _array_of(array, key)
    for prefix, communicator, model in _communicators(trainer, comm):
        name = getattr(communicator, 'name', type(communicator).__name__)
        state[f'{_LAYOUT}{prefix.removeprefix(_EXACT)}{name}'] = numpy.empty(0)
        if hasattr(communicator, 'state'):
            state |= {prefix + key: value for key, value
                      in communicator.state(model).items()}
    for name, iterator in _iterators(trainer):
        if hasattr(getattr(iterator, 'dataset', None), '__len__'):
            state[f'{_LENGTH}{name}'] = numpy.asarray(len(iterator.dataset))
    kept, left_out = _keep(trainer)
    return {**state, **kept}, left_out


def layout(keys: Iterable[str]) -> set[str]:
    """The keys of a state that equal layouts have in common."""
    return {key for key in keys if key.startswith((MODEL, _LAYOUT))}


def restore(state: State, trainer: training.Trainer, comm: Any) -> None:
    """Gives a trainer the state of :func:`collect`, or a part of one."""
    _restore_kept(state, trainer)
    # Parameters that are made while they are loaded draw numbers.
    with preserved():
        # Not strict: an optimizer that had not updated a parameter yet has no
        # state of it; necessary keys were checked before.
        _serialize(trainer, chainer.serializers.NpzDeserializer(
            state, strict=False))
    for prefix, communicator, model in _communicators(trainer, comm):
        if own := {key[len(prefix):]: value for key, value in state.items()
                   if key.startswith(prefix)}:
            communicator.load_state(own, model)


def _serialize(trainer: training.Trainer, serializer: Any) -> None:
    """Saves or loads what Chainer's own snapshots have, and what stops."""
    with saving_parts():
        trainer.serialize(serializer)
    for name, trigger in _triggers(trainer):
        part = serializer[f'job/stopping/{name}']
        if isinstance(trigger, EarlyStoppingTrigger) and part(
                'is there', isinstance(serializer, chainer.Serializer)):
            for one in '_summary', '_interval_trigger', '_max_trigger':
                vars(trigger)[one].serialize(part[one])
            if trigger._stop_condition():   # it fires when it is asked next
                vars(trigger._max_trigger).update(
                    _previous_iteration=math.nan,
                    _previous_epoch_detail=math.nan)
        # One that had other intervals would fire for all that have gone by.
        elif isinstance(trigger, TimeTrigger) and name != _STOP and (
                trigger._next_time <= trainer._snapshot_elapsed_time):
            trigger._next_time = (
                trainer._snapshot_elapsed_time + trigger._period)


def _communicators(trainer: training.Trainer, comm: Any
                   ) -> Iterator[tuple[str, Any, chainer.Link]]:
    """ChainerMN's and this package's: prefix of the state, and of which model.
    """
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        communicator = getattr(optimizer, 'communicator', comm)
        if hasattr(communicator, 'mpi_comm'):
            yield (f'{_EXACT}communicator/{name}/', communicator,
                   optimizer.target)


# --- what a rank takes of another layout, and whether it fits ----------------

def wanted(parts: list[Manifest], rank: int, current: State
           ) -> dict[int, list[str]]:
    """What a rank takes of the files of another layout, by their ranks.

    Of model and optimizers what its own parameters need; of iterators and
    random numbers its own, or else how far the first rank's iterators are;
    of all else the first value.
    """
    own = parts[rank].is_none if rank < len(parts) else {}
    found = defaultdict(list)
    for key, source in {key: part.rank for part in reversed(parts)
                        for key in part.is_none}.items():
        name = key.partition('#')[0]
        # An optimizer's key is about a parameter, or about all: 'main'.
        about = name.removeprefix(_OPTIMIZER).removeprefix(_KEPT).rpartition(
            '/')[0] if name.startswith((_OPTIMIZER, _KEPT)) else ''
        if key in own and key.startswith(
                (_ITERATOR, 'job/iterator/', _RANDOM)):
            source = rank
        elif name == _RANDOM or key.startswith(_EXACT) or (
                key.startswith(_ITERATOR) and key.endswith('/order')) or (
                key.startswith(MODEL) and key not in current) or (
                '/' in about and MODEL + about not in current):
            continue
        found[source].append(key)
    return found


def fit(state: State, current: State) -> None:
    """Fits the iterators in a state of another layout to this one.

    One with another number of samples than it had, such as the share of one
    of two ranks in place of four, goes on at the same share of its epoch.  It
    keeps the order that it has drawn, unless this rank had one as long.
    """
    for key in [key for key in current if key.startswith(_LENGTH)]:
        order, place = (key.replace(_LENGTH, _ITERATOR) + what
                        for what in ('/order', '/current_position'))
        if order in current and current[order].shape != getattr(
                state.get(order), 'shape', None):
            state[order] = current[order]
        if place in state and (was := state.get(key)):
            state[place] = numpy.asarray(state[place] * current[key] // was)


def incompatible(saved: State, current: State, trainer: training.Trainer
                 ) -> str:
    """Why a state cannot be restored; '' if it can."""
    parameters = {
        f'{MODEL}{name}{place}' for name, optimizer
        in trainer.updater.get_all_optimizers().items()
        for place, _ in optimizer.target.namedparams()}
    for key, now in sorted(current.items()):
        was = saved.get(key)
        if was is None:
            # When to save is no state of the training.
            if not key.startswith((
                    'job/', 'stop_trigger/', 'extension_triggers/Snapshot/')
                    ) or _CLASS in key and '#' not in key:
                return (f'{key} is not in the snapshot; build model and '
                        'trainer as they were, with the same extensions')
        elif object not in (now.dtype, was.dtype) and (
                (now.shape, now.dtype) != (was.shape, was.dtype)
                if key in parameters else
                key.startswith(_ITERATOR) and now.shape != was.shape):
            return (f'{key} is {was.dtype} {was.shape} in the snapshot but '
                    f'{now.dtype} {now.shape} here; use the same model and '
                    'data')
    return ''
