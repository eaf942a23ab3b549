"""The state of one rank, complete for an exact continuation."""
# A state is a flat dictionary of arrays.  Its keys are what Chainer calls
# them, or below ``job/`` what Chainer's serializers leave out:
#
#     job/optimizer/main              an optimizer and its hooks
#     job/optimizer/main/l1/W         the update rule of a parameter
#     job/extension/NAME ...          objects of the script's own classes
#     job/communicator/main           residuals and scales
#     job/iterator/main               the number of its samples
#     job/random                      NumPy's and Python's generators
#
# Of optimizers, rules and hooks all attributes are kept that are values
# (values.py).  Chainer's own extensions and iterators save what they need; of
# those of the script's classes, and of its links the generators, what the
# training has changed is kept, too.  What it has changed and is no value is
# named in a warning.  What has changed is found by comparison with the
# fingerprints at the start (note_beginning).
#
# The snapshot's values count.  Extensions, however, expect those of the script
# where a training goes on: ``ExponentialShift`` takes the learning rate that
# it finds for the first one.  So a run that goes on has the script's values
# while extensions are initialised, and the snapshot's from then on.
#
# Keys of a parameter are the same on every rank, so that its state can move.
# What is below ``job/communicator`` and ``job/random`` is of one rank.
from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import chainer
import numpy
from chainer import training

from ..extensions.update_marks import EveryUpdate
from .file import Manifest, State
from .values import GENERATORS, JSON, fingerprint, is_value, pack, put, unpack

MODEL = 'updater/model:'
_ITERATOR, _OPTIMIZER = 'updater/iterator:', 'updater/optimizer:'
_RANDOM, _COMMUNICATOR, _LENGTH, _KEPT = (
    'job/random/', 'job/communicator/', 'job/iterator/', 'job/optimizer/')
# What Chainer's serializers save of optimizers, or other objects' are.
_OF_CHAINER = frozenset(('t', 'epoch', 'target', '_state', '_parent',
                         '_fp32_param'))
_KNOWN = 'chainer', 'chainermn', 'chainer_fp8pipe'
_beginnings: weakref.WeakKeyDictionary[Any, dict[str, dict[str, int]]] = (
    weakref.WeakKeyDictionary())


# --- what is kept besides what Chainer saves ---------------------------------

def optimizers(trainer: training.Trainer) -> Iterator[tuple[str, Any, Any]]:
    """Optimizers and update rules: key, owner, and parameter or None."""
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        # ChainerMN's proxy has the real one inside.
        yield name, getattr(optimizer, 'actual_optimizer', optimizer), None
        for place, one in optimizer.target.namedparams():
            if getattr(one, 'update_rule', None) is not None:
                yield name + place, one.update_rule, one


def _parts(owner: Any) -> dict[str, Any]:
    """An owner, its hyperparameters and hooks, by their prefixes."""
    found = {'': owner}
    if getattr(owner, 'hyperparam', None) is not None:
        found['hyperparam.'] = owner.hyperparam
    hooks = getattr(owner, '_hookable', None)
    for name, hook in () if hooks is None else (
            *hooks._pre_update_hooks.items(),
            *hooks._post_update_hooks.items()):
        # One that another one calls, or whose method is called.
        hook = getattr(hook, '_hook', hook)
        hook = getattr(hook, '__self__', hook)
        if hasattr(hook, '__dict__'):
            found[f'hook {name}.'] = hook
    return found


def _is_known(one: Any) -> bool:
    """Whether its class saves what it needs: it is none of the script's."""
    return str(getattr(one, '__module__', '')).partition('.')[0] in _KNOWN


def _own(trainer: training.Trainer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Attributes of objects of the script's classes, by their names."""
    updater = trainer.updater
    found = [('updater', updater), ('stop trigger', trainer.stop_trigger)]
    found += [(f'iterator {name}', one) for name, one in getattr(
        updater, '_iterators', {}).items()]
    for name, entry in trainer._extensions.items():
        found += [(f'extension {name}', getattr(
            entry.extension, '__self__', entry.extension)),
            (f'trigger of {name}', entry.trigger)]
    for name, one in found:
        if not _is_known(one) and hasattr(one, '__dict__'):
            yield name, vars(one)
    for name, optimizer in updater.get_all_optimizers().items():
        for place, link in optimizer.target.namedlinks():
            generators = {key: value for key, value in vars(link).items()
                          if isinstance(value, GENERATORS)}
            if generators:
                yield f'link {name}{place}', generators


def _prefix(name: str) -> str:
    return f'job/{name.replace(" ", "/", 1)}/'


def _script_parts(trainer: training.Trainer
                  ) -> Iterator[tuple[str, dict[str, Any]]]:
    """All of whose attributes the training may change, by their names."""
    yield from _own(trainer)
    for key, owner, _ in optimizers(trainer):
        for prefix, part in _parts(owner).items():
            if not _is_known(part):
                yield f'{prefix}{key}', vars(part)


def note_beginning(trainer: training.Trainer) -> dict[str, dict[str, int]]:
    """Notes what attributes are before the training changes them.

    Call it before a trainer runs or is resumed; the first call counts, for
    each object that may have been added since.
    """
    first = _beginnings.setdefault(trainer, {})
    for name, attributes in _script_parts(trainer):
        if name not in first:
            first[name] = {attribute: fingerprint(value)
                           for attribute, value in attributes.items()}
    return first


def _keep(trainer: training.Trainer) -> tuple[State, list[str]]:
    """Attributes that Chainer does not save; and the names of the others."""
    first, state = note_beginning(trainer), State()
    left_out = [
        f'{attribute} of {name}, a {type(value).__name__}'
        for name, attributes in _script_parts(trainer)
        for attribute, value in attributes.items()
        if attribute not in _OF_CHAINER and not is_value(value)
        and first[name].get(attribute) != fingerprint(value)]
    for name, attributes in _own(trainer):
        for attribute, value in attributes.items():
            if is_value(value) and (
                    first[name].get(attribute) != fingerprint(value)):
                state |= pack(_prefix(name) + attribute, value)
    for key, owner, _ in optimizers(trainer):
        values = {prefix + attribute: value
                  for prefix, part in _parts(owner).items()
                  for attribute, value in vars(part).items()
                  if attribute not in _OF_CHAINER and is_value(value)}
        state |= pack(f'{_KEPT}{key}/values', [type(owner).__name__, values])
        if (master := getattr(owner, '_fp32_param', None)) is not None:
            state[f'{_KEPT}{key}/float32'] = chainer.backends.cuda.to_cpu(
                master.array)
    return state, left_out


def _restore_own(state: State, trainer: training.Trainer) -> None:
    for name, attributes in _own(trainer):
        for attribute in below(_prefix(name), state):
            if '#' not in attribute and '/' not in attribute:
                put(attributes, attribute,
                    unpack(_prefix(name) + attribute, state))


def _restore_optimizers(state: State, trainer: training.Trainer) -> None:
    script: list[tuple[dict[str, Any], str, Any, Any]] = []
    for key, owner, parameter in optimizers(trainer):
        parts, values = _parts(owner), f'{_KEPT}{key}/values'
        for name, value in (unpack(values, state)[1] if values in state
                            else {}).items():
            prefix, dot, attribute = name.rpartition('.')
            if prefix + dot not in parts:
                continue
            attributes = vars(parts[prefix + dot])
            before = attributes.get(attribute)
            put(attributes, attribute, value)
            if attribute in attributes and isinstance(
                    value, (bool, int, float, str, numpy.generic)):
                script.append((attributes, attribute, before, value))
        if parameter is not None and f'{_KEPT}{key}/float32' in state:
            owner._fp32_param = chainer.Parameter(parameter.xp.asarray(
                state[f'{_KEPT}{key}/float32']), name=parameter.name)
        if any(value is None for value in (
                getattr(owner, 'state', None) or {}).values()):
            owner._state = None     # it makes one at its first update
    _show_script_values(trainer, script)


def _show_script_values(trainer: training.Trainer, script: list[Any]) -> None:
    """Extensions are initialised with the values of the script."""
    def begin(_: Any) -> None:
        # But for what was set since, which counts.
        script[:] = [one for one in script if one[0].get(one[1]) is one[3]]
        for place, name, value, _ in script:
            place[name] = value

    def go_on(_: Any) -> None:
        for place, name, _, value in script:
            place[name] = value
        script.clear()
    for act, priority in (begin, float('inf')), (go_on, float('-inf')):
        name = f'values of the snapshot {act.__name__}'
        trainer._extensions.pop(name, None)
        trainer.extend(training.make_extension(initializer=act)(
            lambda _: None), name, EveryUpdate(), priority)


# --- all of it ---------------------------------------------------------------

def collect(trainer: training.Trainer, comm: Any) -> tuple[State, list[str]]:
    """This rank's state, and what the training changes that is not in it.

    ``comm`` is the argument of ``Snapshot``.

    Raises:
        TypeError: An object cannot be saved; its key is named.
    """
    state: State = {}
    _Saver(state).save(trainer)
    kept, left_out = _keep(trainer)
    state |= kept
    for prefix, communicator, model in _stateful(trainer, comm):
        state |= {prefix + key: value for key, value
                  in communicator.state(model).items()}
    for name, iterator in getattr(trainer.updater, '_iterators', {}).items():
        samples = getattr(getattr(iterator, 'dataset', None), '__len__', None)
        if samples is not None:
            state[f'{_LENGTH}{name}'] = numpy.asarray(samples())
    return state | pack(_RANDOM + 'numpy', numpy.random.get_state()) | pack(
        _RANDOM + 'python', random.getstate()), left_out


def stop_state(trainer: training.Trainer) -> State:
    """The part of a state that is the stop trigger's."""
    state: State = {}
    if hasattr(trainer.stop_trigger, 'serialize'):
        trainer.stop_trigger.serialize(_Saver(state)['stop_trigger'])
    return state


def restore(state: State, trainer: training.Trainer, comm: Any) -> None:
    """Gives a trainer the state of :func:`collect`, or a part of one."""
    _restore_own(state, trainer)
    trainer.serialize(_Loader(state, trainer))
    _restore_optimizers(state, trainer)
    for prefix, communicator, model in _stateful(trainer, comm):
        if own := below(prefix, state):
            communicator.load_state(own, model)
    if _RANDOM + 'numpy' in state:
        numpy.random.set_state(unpack(_RANDOM + 'numpy', state))
        random.setstate(unpack(_RANDOM + 'python', state))


def below(prefix: str, state: State) -> State:
    """The part of a state whose keys start with ``prefix``, without it."""
    return {key[len(prefix):]: value for key, value in state.items()
            if key.startswith(prefix)}


class _Saver(chainer.serializers.DictionarySerializer):
    """Chainer's, without pickles."""

    def __getitem__(self, key: str) -> Any:
        return _Saver(self.target, f'{self.path}{key.strip("/")}/')

    def save(self, trainer: Any) -> None:
        started = trainer._start_at
        if started is None:     # one that has not run yet raises
            trainer._start_at = 0.0
        try:
            trainer.serialize(self)
        finally:
            trainer._start_at = started
        if started is None:
            self('_snapshot_elapsed_time', trainer._snapshot_elapsed_time)

    def __call__(self, key: str, value: Any) -> Any:
        name, found = self.path + key.lstrip('/'), value
        try:
            super().__call__(key, value)
            array = numpy.asarray(self.target.pop(name))
            found = value if array.dtype == object else array
        except (TypeError, ValueError):     # it has no shape, say
            pass
        try:
            self.target.update(pack(name, found))
        except TypeError as error:
            raise TypeError(
                f'{name} cannot be saved: {error}; serialize arrays, numbers, '
                'texts, and lists and dictionaries of them') from None
        return value


class _Loader(chainer.serializers.NpzDeserializer):
    """Chainer's, which also loads persistent values that have changed.

    Chainer refuses a number in place of an integer, an array of another
    shape, and what is neither array, number nor text.
    """

    # Not strict: an optimizer that had not updated a parameter yet has no
    # state of it; necessary keys were checked before.
    def __init__(self, state: State, trainer: training.Trainer) -> None:
        super().__init__(state, strict=False)
        self._parameters = parameters_of(trainer)

    def __getitem__(self, key: str) -> Any:
        child = copy.copy(self)
        child.path = f'{self.path}{key.strip("/")}/'
        return child

    def __call__(self, key: str, value: Any) -> Any:
        name = self.path + key.lstrip('/')
        saved = self.npz.get(name)
        if saved is None:
            return value
        if saved.dtype == JSON:
            return unpack(name, self.npz)
        try:
            return super().__call__(key, value)
        except (TypeError, ValueError):
            if not name.startswith(MODEL) or name in self._parameters:
                raise
        if isinstance(value, chainer.get_array_types()):
            return chainer.backend.get_device_from_array(value).send(saved)
        return saved if saved.shape else saved.item()


def _stateful(trainer: training.Trainer, comm: Any
              ) -> Iterator[tuple[str, Any, chainer.Link]]:
    """Communicators that have a state, its prefix, and of which model."""
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        communicator = getattr(optimizer, 'communicator', comm)
        if hasattr(communicator, 'state'):
            yield f'{_COMMUNICATOR}{name}/', communicator, optimizer.target


def names_of_communicators(trainer: training.Trainer, comm: Any) -> str:
    """The names of the job's communicators, as a snapshot has them.

    Of ``comm``, and of multi-node optimizers.
    """
    found = [comm] if hasattr(comm, 'mpi_comm') else []
    for optimizer in trainer.updater.get_all_optimizers().values():
        communicator = getattr(optimizer, 'communicator', None)
        if communicator is not None and not any(
                communicator is other for other in found):
            found.append(communicator)
    return ', '.join(getattr(one, 'name', type(one).__name__)
                     for one in found) or 'none'


# --- what a rank takes of a snapshot, and whether it fits --------------------

def parameters_of(trainer: training.Trainer) -> set[str]:
    """The keys of this rank's parameters."""
    return {f'{MODEL}{name}{place}'
            for name, optimizer in trainer.updater.get_all_optimizers().items()
            for place, _ in optimizer.target.namedparams()}


def layout(keys: Collection[str]) -> set[str]:
    """The keys of the model and of the updater's own values.

    Two ranks with equal ones do the same part of the same job.
    """
    return {value_of(key) for key in keys
            if key.startswith(MODEL) or _of_updater(key)}


def value_of(key: str) -> str:
    """The key of the value that an array is a part of."""
    return key.partition('#')[0]


def _of_updater(key: str) -> bool:
    """Whether this is an updater's own value, such as ``iteration``."""
    return key.startswith('updater/') and ':' not in key


def wanted(parts: list[Manifest], rank: int, current: State,
           trainer: training.Trainer) -> dict[int, list[str]]:
    """What a rank takes of the files of another layout, by their ranks.

    Of model and optimizers what its own parameters need, of the first rank
    that had it; of iterators and random numbers what it had itself, and the
    first rank's iterators if it was not there; nothing of communicators; and
    the first rank's value of all else.
    """
    here = {'', *(key.removeprefix(MODEL) for key in parameters_of(trainer))}
    found: dict[int, list[str]] = {}
    for key, first in {key: part.rank for part in reversed(parts)
                       for key in part.digests}.items():
        source = first
        if key.startswith(('job/iterator', _ITERATOR, _RANDOM)):
            if rank < len(parts) and key in parts[rank].digests:
                source = rank
            elif key.startswith(_RANDOM):
                continue
        elif key.startswith(_COMMUNICATOR) or (
                key.startswith(MODEL) and value_of(key) not in current) or (
                key.startswith((_OPTIMIZER, _KEPT))
                and parameter_of(key) not in here):
            continue
        found.setdefault(source, []).append(key)
    return found


def parameter_of(key: str) -> str:
    """The parameter that an optimizer's key is about, as in ``main/l1/W``.

    '' if the key is about the optimizer as a whole.
    """
    owner = key.removeprefix(_OPTIMIZER).removeprefix(_KEPT).rpartition('/')[0]
    return owner if '/' in owner else ''


def fitted(saved: State, current: State, parts: list[Manifest], rank: int
           ) -> tuple[State, str]:
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
    for name, length in below(_LENGTH, current).items():
        was = saved.get(_LENGTH + name)
        order, place = (f'{_ITERATOR}{name}/{what}'
                        for what in ('order', 'current_position'))
        orders = {part.digests[order] for part in parts
                  if order in part.digests}
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


def incompatible(saved: State, current: State, trainer: training.Trainer,
                 exact: bool) -> str:
    """Why a state cannot be restored; '' if it can.

    If the layout is not exactly that of the snapshot, the updater may have
    other values.
    """
    lacks = [key for key in current if key not in saved
             and not key.startswith('job/') and '#' not in key
             and (exact or not _of_updater(key))]
    lacks.sort(key=lambda key: not key.startswith(MODEL))    # the model first
    if lacks:
        return f'{describe(lacks[0])} is not in the snapshot; build the ' + (
            'model as it was' if lacks[0].startswith(MODEL) else
            'trainer as it was, with the same extensions')
    parameters = parameters_of(trainer)
    for key, value in sorted(saved.items(), key=lambda item: item[0]):
        now = current.get(key)
        if now is None or JSON in (now.dtype, value.dtype):
            continue
        if key in parameters and (now.shape, now.dtype) != (
                value.shape, value.dtype):
            return (f'{describe(key)} is {value.dtype} {value.shape} in the '
                    f'snapshot but {now.dtype} {now.shape} in the model')
        if key.startswith(_ITERATOR) and now.shape != value.shape:
            return (f'{describe(key)} has shape {value.shape} in the snapshot '
                    f'but {now.shape} here; use the same data set')
    for key in current:
        if key.startswith(_KEPT) and key.endswith('/values'):
            now, was = (unpack(key, state)[0] if key in state else None
                        for state in (current, saved))
            if now != was:
                name, _, parameter = parameter_of(key).partition('/')
                return (f'the update rule of /{parameter}' if parameter else
                        f'optimizer {key[len(_KEPT):-7]!r}') + (
                    f' is {now}, in the snapshot it is {was}')
    return ''


def lost_rules(saved: Collection[str], current: Collection[str]) -> str:
    """What to say of parameters that have no update rule any more."""
    lost = {parameter_of(key) for key in saved if key.startswith(_KEPT)} - {
        parameter_of(key) for key in current if key.startswith(_KEPT)}
    return (f'{", ".join(sorted(lost))} had an update rule in the snapshot, '
            'and have none in the script: they are not updated any more'
            if lost else '')


def describe(key: str) -> str:
    """The name of a key in messages."""
    if key.startswith(MODEL):
        return 'parameter /' + key[len(MODEL):].partition('/')[2]
    return key
