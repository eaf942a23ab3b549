"""The state of one rank, complete for an exact continuation."""
# A state is a flat dictionary of arrays.  Its keys are what Chainer calls
# them, or below ``job/`` what Chainer's serializers leave out:
#
#     job/optimizer/main/own            attributes of an optimizer
#     job/optimizer/main/hook NAME      of its hooks; so for hyperparameters
#     job/optimizer/main/l1/W/own       the same of a parameter's update rule
#     job/extension/NAME ...            objects of the script's own classes
#     job/communicator/main, job/iterator/main, job/random
#
# Of optimizers, rules and hooks all attributes are kept that JSON with arrays
# in it can hold; of the script's own classes those that the training has
# changed, as others may be of the rank or folder.  What it has changed and
# cannot be kept, also a generator in a link, is named in a warning.
#
# Keys of a parameter are the same on every rank, so that its state can move.
# What is below ``job/communicator`` and ``job/random`` is of one rank.
from __future__ import annotations

import contextlib
import inspect
import json
import pickle
import random
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import chainer
import numpy
from chainer import training
from chainer.training import trainer as trainer_module

from ...intercept.training_objects import LIBRARIES
from .file import Manifest, State

MODEL = 'updater/model:'
_ITERATOR, _OPTIMIZER = 'updater/iterator:', 'updater/optimizer:'
_RANDOM, _COMMUNICATOR, _LENGTH, _KEPT = (
    'job/random', 'job/communicator/', 'job/iterator/', 'job/optimizer/')
#: Attributes of optimizers that Chainer saves, or another object has.
_ELSEWHERE = frozenset((
    't', 'epoch', 'target', '_state', '_parent', '_fp32_param'))
#: None, and what Python has in place of arrays, is JSON in an array of this.
_JSON = numpy.dtype('V1')
_SIMPLE = bool, int, float, str, type(None)
_GENERATORS = random.Random, numpy.random.RandomState, numpy.random.Generator


# --- objects as JSON and arrays ----------------------------------------------

def _json(value: Any) -> numpy.ndarray:
    return numpy.frombuffer(json.dumps(value).encode(), _JSON)


def _array_of(value: Any) -> numpy.ndarray | None:
    """What NumPy's files can hold; None: it is something else."""
    if not isinstance(value, (numpy.generic, *chainer.get_array_types())):
        return None
    array = numpy.asarray(chainer.backends.cuda.to_cpu(value))
    return array if array.dtype.kind in 'biufcSUmM' and numpy.dtype(
        array.dtype.str) == array.dtype and array.dtype.itemsize else None


def _pack(value: Any, key: str, arrays: State) -> Any:
    """What JSON holds; arrays in it get keys of their own.

    Raises TypeError for anything else.
    """
    if type(value) in _SIMPLE:
        return value
    if (array := _array_of(value)) is not None:
        place = f'{key}#{len(arrays)}'
        arrays[place] = array
        return {'array': [place, isinstance(
            value, (numpy.ndarray, numpy.generic))]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [
            _pack(one, key, arrays) for one in value]}
    if type(value) is dict and all(type(name) is str for name in value):
        return {'dict': {name: _pack(one, key, arrays)
                         for name, one in value.items()}}
    raise TypeError


def _unpack(packed: Any, state: State, device: Any) -> Any:
    if not isinstance(packed, dict):
        return packed
    (kind, value), = packed.items()
    if kind == 'array':
        array = state[value[0]]
        return array[()] if value[1] else device.send(array)
    if kind == 'dict':
        return {name: _unpack(one, state, device)
                for name, one in value.items()}
    found = [_unpack(one, state, device) for one in value]
    return found if kind == 'list' else tuple(found)


# --- what is kept besides what Chainer saves ---------------------------------

def _optimizers(trainer: training.Trainer) -> Iterator[tuple[str, Any, Any]]:
    """Optimizers and update rules: key, owner, and parameter or None."""
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        # ChainerMN's proxy has the real one inside.
        yield name, getattr(optimizer, 'actual_optimizer', optimizer), None
        for place, one in optimizer.target.namedparams():
            if getattr(one, 'update_rule', None) is not None:
                yield name + place, one.update_rule, one


def _owners(trainer: training.Trainer) -> Iterator[tuple[str, Any]]:
    """Objects whose attributes are kept, by their keys."""
    for key, owner, _ in _optimizers(trainer):
        yield f'{_KEPT}{key}/own', owner
        yield f'{_KEPT}{key}/hyperparam', owner.hyperparam
        for name, hook in (*owner._hookable._pre_update_hooks.items(),
                           *owner._hookable._post_update_hooks.items()):
            # One that another one calls, or whose method is called.
            hook = getattr(hook, '_hook', hook)
            yield (f'{_KEPT}{key}/hook {name.replace("/", ":")}',
                   getattr(hook, '__self__', hook))
    updater = trainer.updater
    found = [
        ('updater/own', updater), ('trigger/stop', trainer.stop_trigger),
        *((f'of iterator/{name}', one) for name, one in getattr(
            updater, '_iterators', {}).items())]
    for name, entry in trainer._extensions.items():
        own = inspect.unwrap(entry.extension)
        found += [(f'extension/{name}', getattr(own, '__self__', own)),
                  (f'trigger of/{name}', inspect.unwrap(entry.trigger))]
    for key, one in found:
        if not _is_librarys(one):
            yield f'job/{key}', one
    for name, optimizer in updater.get_all_optimizers().items():
        for place, link in optimizer.target.namedlinks():
            yield f'job/link/{name}{place}', link


def _is_librarys(one: Any) -> bool:
    return str(getattr(one, '__module__', '')).partition('.')[0] in LIBRARIES


def _attributes(owner: Any) -> dict[str, Any]:
    """Those that may be kept."""
    found = dict(getattr(owner, '__dict__', {}))
    if isinstance(owner, chainer.Link):
        return {name: value for name, value in found.items()
                if isinstance(value, _GENERATORS)}
    elsewhere = _ELSEWHERE if isinstance(owner, (
        chainer.Optimizer, chainer.UpdateRule)) else {'dataset'} if isinstance(
            owner, chainer.dataset.Iterator) else ()
    return {name: value for name, value in found.items()
            if name not in elsewhere}


def _fingerprint(value: Any) -> int:
    """A number that changes when a value does; objects are only told apart."""
    if isinstance(value, (*_SIMPLE, *_GENERATORS, list, dict, tuple, set,
                          numpy.generic, *chainer.get_array_types())):
        with contextlib.suppress(Exception):    # of an object in it
            return hash(pickle.dumps(value))
    return id(value)


#: By trainer: of which a snapshot was taken, or which went on from one.
beginnings: weakref.WeakKeyDictionary[Any, dict[str, dict[str, int]]] = (
    weakref.WeakKeyDictionary())


def note_beginning(trainer: training.Trainer) -> dict[str, dict[str, int]]:
    """Notes what attributes are before the training changes them.

    Call it before a trainer runs or is resumed; the first call counts, for
    each object that may have been added since.
    """
    first = beginnings.setdefault(trainer, {})
    for key, owner in _owners(trainer):
        if key not in first:
            first[key] = {name: _fingerprint(value)
                          for name, value in _attributes(owner).items()}
    return first


def _keep(trainer: training.Trainer) -> tuple[State, list[str]]:
    """Attributes that Chainer does not save; and the names of the others."""
    first, state, left_out = note_beginning(trainer), State(), []
    for key, owner in _owners(trainer):
        kept, arrays = {}, State()
        for name, value in _attributes(owner).items():
            def is_changed(key: str = key, name: str = name,
                           value: Any = value) -> bool:
                return first[key].get(name) != _fingerprint(value)
            if key.startswith(_KEPT) or is_changed():
                try:
                    kept[name] = _pack(value, key, arrays)
                except (TypeError, RecursionError):     # it has itself
                    left_out += [f'{name} of {key[4:].replace("/", " ", 1)}, '
                                 f'a {type(value).__name__}'] * (
                                     is_changed() and not _is_librarys(owner))
        if kept or key.startswith(_KEPT):
            state |= {key: _json([type(owner).__name__, kept]), **arrays}
    return state, left_out


def _restore_kept(state: State, trainer: training.Trainer) -> None:
    device = next(iter(
        trainer.updater.get_all_optimizers().values())).target.device
    script: list[Any] = []
    for key, owner in _owners(trainer):
        kept = json.loads(state[key].tobytes())[1] if key in state else {}
        for name, packed in kept.items():
            value, old = _unpack(packed, state, device), vars(owner).get(name)
            if key.startswith(_KEPT):
                if name in vars(owner):
                    script.append([vars(owner), name, old])
            # The script may have other names of it.
            elif type(old) is type(value) is list:
                old[:], value = value, old
            elif type(old) is type(value) is dict:
                old.clear()
                old.update(value)
                value = old
            vars(owner)[name] = value

    # Extensions expect the script's values where a training goes on:
    # ``ExponentialShift`` takes the rate that it finds for the first one.
    def swap(_: Any) -> None:
        for one in script:
            attributes, name, value = one
            one[2], attributes[name] = attributes.get(name), value
    for what, priority in ('first', float('inf')), ('last', float('-inf')):
        name = f"the script's values {what}"
        trainer._extensions.pop(name, None)
        trainer.extend(training.make_extension(initializer=swap)(
            lambda _: None), name, lambda _: False, priority)


# --- all of it ---------------------------------------------------------------

def collect(trainer: training.Trainer, comm: Any) -> tuple[State, list[str]]:
    """This rank's state, and what the training changes that is not in it.

    ``comm`` is the argument of ``Snapshot``.

    Raises:
        TypeError: An object cannot be saved; its key is named.
    """
    started = trainer._start_at
    if started is None:         # one that has not run yet raises
        trainer._start_at = trainer_module._get_time()
    try:
        state = arrays_of(trainer)
    finally:
        trainer._start_at = started
    kept, left_out = _keep(trainer)
    state |= kept
    for key, rule, _ in _optimizers(trainer):
        if (master := getattr(rule, '_fp32_param', None)) is not None:
            state[f'{_KEPT}{key}/float32'] = chainer.backends.cuda.to_cpu(
                master.array)
    for prefix, communicator, model in _communicators(trainer, comm):
        if hasattr(communicator, 'state'):
            state |= {prefix + key: value for key, value
                      in communicator.state(model).items()}
    for name, iterator in getattr(trainer.updater, '_iterators', {}).items():
        if hasattr(getattr(iterator, 'dataset', None), '__len__'):
            state[f'{_LENGTH}{name}'] = numpy.asarray(len(iterator.dataset))
    arrays = State()
    state[_RANDOM] = _json(_pack(
        [numpy.random.get_state(), random.getstate()], _RANDOM, arrays))
    return state | arrays, left_out


def arrays_of(thing: Any, path: str = '') -> State:
    """What Chainer saves of it, without pickles."""
    serializer = chainer.serializers.DictionarySerializer(path=path)
    thing.serialize(serializer)
    state: State = {}
    for key, value in serializer.target.items():
        array = numpy.asarray(value)
        if array.dtype == object and array[()] is None:
            state[key] = _json(None)
        elif array.dtype.itemsize == 0:     # NumPy's files know no empty texts
            state[key] = array.astype(f'{array.dtype.kind}1')
        elif (found := _array_of(array)) is not None:
            state[key] = found
        else:
            raise TypeError(f'{key} cannot be saved; serialize arrays, '
                            'numbers and texts')
    return state


def restore(state: State, trainer: training.Trainer, comm: Any) -> None:
    """Gives a trainer the state of :func:`collect`, or a part of one."""
    _restore_kept(state, trainer)
    # Not strict: an optimizer that had not updated a parameter yet has no
    # state of it; necessary keys were checked before.
    trainer.serialize(chainer.serializers.NpzDeserializer({
        key: numpy.asarray(None) if value.dtype == _JSON else value
        for key, value in state.items()}, strict=False))
    for key, owner, parameter in _optimizers(trainer):
        if (master := state.get(f'{_KEPT}{key}/float32')) is not None:
            owner._fp32_param = chainer.Parameter(
                parameter.xp.asarray(master), name=parameter.name)
        if any(value is None for value in (
                getattr(owner, 'state', None) or {}).values()):
            owner._state = None     # it makes one at its first update
    for prefix, communicator, model in _communicators(trainer, comm):
        if own := _below(prefix, state):
            communicator.load_state(own, model)
    if _RANDOM in state:
        numpys, pythons = _unpack(
            json.loads(state[_RANDOM].tobytes()), state, None)
        numpy.random.set_state(numpys)
        random.setstate(pythons)


def _below(prefix: str, state: State) -> State:
    """The part of a state whose keys start with ``prefix``, without it."""
    return {key[len(prefix):]: value for key, value in state.items()
            if key.startswith(prefix)}


def _communicators(trainer: training.Trainer, comm: Any
                   ) -> Iterator[tuple[str, Any, chainer.Link]]:
    """ChainerMN's and this package's: prefix of the state, and of which model.
    """
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        communicator = getattr(optimizer, 'communicator', comm)
        if hasattr(communicator, 'mpi_comm'):
            yield f'{_COMMUNICATOR}{name}/', communicator, optimizer.target


def names_of_communicators(trainer: training.Trainer, comm: Any) -> str:
    """The names of the job's communicators, as a snapshot has them."""
    return ', '.join(sorted({
        getattr(one, 'name', type(one).__name__)
        for _, one, _ in _communicators(trainer, comm)})) or 'none'


# --- what a rank takes of a snapshot, and whether it fits --------------------

def layout(keys: Collection[str]) -> set[str]:
    """The keys of the model: ranks with equal ones have the same part."""
    return {key for key in keys if key.startswith(MODEL)}


def _parameters(trainer: training.Trainer) -> set[str]:
    """The keys of this rank's parameters, without :data:`MODEL`."""
    return {name + place for name, optimizer
            in trainer.updater.get_all_optimizers().items()
            for place, _ in optimizer.target.namedparams()}


def wanted(parts: list[Manifest], rank: int, current: State,
           trainer: training.Trainer) -> dict[int, list[str]]:
    """What a rank takes of the files of another layout, by their ranks.

    Of model and optimizers what its own parameters need, of the first rank
    that had it; of iterators and random numbers what it had itself, and the
    first rank's iterators if it was not there; nothing of communicators; and
    the first rank's value of all else.
    """
    here = _parameters(trainer)
    found: dict[int, list[str]] = {}
    for key, source in {key: part.rank for part in reversed(parts)
                        for key in part.digests}.items():
        if key.startswith((_ITERATOR, _LENGTH, 'job/of iterator/', _RANDOM)):
            if rank < len(parts) and key in parts[rank].digests:
                source = rank
            elif key.startswith(_RANDOM):
                continue
        elif key.startswith(_COMMUNICATOR) or (
                key.startswith(MODEL) and key not in current) or (
                key.startswith((_OPTIMIZER, _KEPT))
                and _parameter_of(key) not in {'', *here}):
            continue
        found.setdefault(source, []).append(key)
    return found


def _parameter_of(key: str) -> str:
    """The parameter that an optimizer's key is about, as in ``main/l1/W``.

    '' if the key is about the optimizer as a whole.
    """
    owner = key.partition('#')[0].removeprefix(_OPTIMIZER).removeprefix(
        _KEPT).rpartition('/')[0]
    return owner if '/' in owner else ''


def fitted(saved: State, current: State, parts: list[Manifest], rank: int
           ) -> tuple[State, str]:
    """A state of another layout, whose iterators fit this one.

    An iterator that has another number of samples than it had, such as the
    share of one of two ranks in place of four, goes on at the same share of
    its epoch.  An order goes on if it is of as many samples, and this
    rank's, or was that of all; else the iterator keeps the one it has drawn.

    Returns:
        The state, and a sentence about what is another; '' if nothing is.
    """
    state, changed = dict(saved), ''
    for name, length in _below(_LENGTH, current).items():
        was = saved.get(_LENGTH + name)
        order, place = (f'{_ITERATOR}{name}/{what}'
                        for what in ('order', 'current_position'))
        orders = {part.digests.get(order) for part in parts} - {None}
        if order in current and order in saved and (
                saved[order].shape != current[order].shape
                or rank >= len(parts) and len(orders) > 1):
            state[order] = current[order]
            changed += f', iterator {name!r} in an order of its own'
        if was is not None and was != length and place in saved:
            state[place] = numpy.asarray(saved[place] * length // max(was, 1))
            changed += (f', iterator {name!r} at the same share of its '
                        f'epoch, of {length} samples in place of {was}')
    return state, changed


def incompatible(saved: State, current: State, trainer: training.Trainer
                 ) -> str:
    """Why a state cannot be restored; '' if it can."""
    parameters = {MODEL + place for place in _parameters(trainer)}
    # The model first.
    for key, now in sorted(current.items(), key=lambda item: (
            not item[0].startswith(MODEL), item[0])):
        was = saved.get(key)
        if was is None:
            if not key.startswith('job/'):
                return (f'{describe(key)} is not in the snapshot; build model '
                        'and trainer as they were, with the same extensions')
        elif key.startswith(_KEPT) and key.endswith('/own'):
            kind, before = (json.loads(state[key].tobytes())[0]
                            for state in (current, saved))
            if kind != before:
                return (f'{key[len(_KEPT):-4]} has {kind}, in the snapshot '
                        f'{before}')
        elif _JSON not in (now.dtype, was.dtype) and (
                (now.shape, now.dtype) != (was.shape, was.dtype)
                if key in parameters else
                key.startswith(_ITERATOR) and now.shape != was.shape):
            return (f'{describe(key)} is {was.dtype} {was.shape} in the '
                    f'snapshot but {now.dtype} {now.shape} here; use the '
                    'same model and data')
    return ''


def describe(key: str) -> str:
    """The name of a key in messages."""
    if key.startswith(MODEL):
        return 'parameter /' + key[len(MODEL):].partition('/')[2]
    return key
