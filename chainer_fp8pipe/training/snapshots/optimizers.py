"""The state of optimizers that Chainer does not serialize."""
# All that an optimizer, its update rules and their hooks keep besides what
# Chainer saves, as long as it is numbers, texts, arrays, or containers of
# them: hyperparameters (a learning rate that an extension has changed), also
# those of single parameters, ``enabled``, the dynamic loss scale, and the
# float32 copies of float16 parameters (``use_fp32_update``).
#
# Chainer saves none of these, and its extensions expect those of the script
# where a training goes on: ``ExponentialShift`` takes the learning rate that
# it finds for the first one.  So a run that goes on has the script's values
# while extensions are initialised, and the snapshot's from then on.
#
# And a value that the script has changed between two starts counts, as it
# does in Chainer.  That it has changed is known by the values with which the
# run began, after extensions were initialised; a snapshot has those, too.
from __future__ import annotations

import copy
import numbers
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy
from chainer import training

from ..extensions.update_marks import EveryUpdate
from .file import State, object_array, to_json

# What Chainer's serializers save, and what refers to other objects.
_OF_CHAINER = frozenset(('t', 'epoch', 'target', '_state', '_parent'))
_SIMPLE = frozenset((type(None), bool, int, str))
_NONE = object()            # where there is no value
# The values with which a training began, by optimizer or update rule.
_first: weakref.WeakKeyDictionary[Any, dict[str, Any]] = (
    weakref.WeakKeyDictionary())


def below(prefix: str, state: State) -> State:
    """The part of a state whose keys start with ``prefix``, without it."""
    return {key[len(prefix):]: value for key, value in state.items()
            if key.startswith(prefix)}


def owners(trainer: chainer.training.Trainer) -> Iterator[tuple[str, Any]]:
    """All optimizers and update rules, by their keys.

    ``main`` is an optimizer, ``main/l1/W`` the rule of a parameter.
    """
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        # ChainerMN's proxy has the real one inside.
        yield name, getattr(optimizer, 'actual_optimizer', optimizer)
        for place, parameter in optimizer.target.namedparams():
            if (rule := getattr(parameter, 'update_rule', None)) is not None:
                yield name + place, rule


def holders_of(owner: Any) -> dict[str, Any]:
    """What has the attributes: the owner, its hyperparameters, its hooks."""
    found = {'': owner}
    if getattr(owner, 'hyperparam', None) is not None:
        found['hyperparam'] = owner.hyperparam
    hooks = getattr(owner, '_hookable', None)
    for name, hook in () if hooks is None else (
            *hooks._pre_update_hooks.items(),
            *hooks._post_update_hooks.items()):
        # One that another one calls; a method's object has no attributes.
        hook = getattr(hook, '_hook', getattr(hook, '__func__', hook))
        if hasattr(hook, '__dict__'):
            found[f'hook {name}'] = hook
    return found


def note_first_values(trainer: chainer.training.Trainer) -> None:
    """Notes with which values a training begins, unless that is known.

    Call it when extensions have been initialised.
    """
    for _, owner in owners(trainer):
        if owner not in _first:
            _first[owner] = copy.deepcopy(_kept(owner)[0])


def collect_optimizers(trainer: chainer.training.Trainer) -> State:
    """The state of every optimizer, with keys below its name.

    Of each owner, such as ``main/l1/W``: ``float32``, ``array0`` and so on,
    and ``values``: the name of its class, its values, those of the beginning
    that are others now (None: they were not noted), and the arrays' names.
    """
    state: State = {}
    for key, owner in owners(trainer):
        now, arrays = _kept(owner)
        changed = {name: value for name, value in _first[owner].items()
                   if not _same(value, now.get(name, _NONE))
                   } if owner in _first else None
        state[f'{key}/values'] = object_array(
            (type(owner).__name__, now, changed, [*arrays]))
        for number, array in enumerate(arrays.values()):
            state[f'{key}/array{number}'] = chainer.backends.cuda.to_cpu(
                array)
        master = getattr(owner, '_fp32_param', None)
        if master is not None and master.array is not None:
            state[f'{key}/float32'] = chainer.backends.cuda.to_cpu(
                master.array)
    return state


def parameter_of(key: str) -> str:
    """The parameter that a key of :func:`collect_optimizers` is about.

    With the optimizer's name, as in ``main/l1/W``; '' if the key is about the
    optimizer as a whole.
    """
    owner = key.rpartition('/')[0]
    return owner if '/' in owner else ''


def classes_differ(saved: State, current: State) -> str:
    """Why a state is of other optimizers or update rules; '' if it is not."""
    for key, value in current.items():
        owner, _, what = key.rpartition('/')
        if what != 'values':
            continue
        now, was = value.item()[0], (
            saved[key].item()[0] if key in saved else None)
        if now != was:
            name, _, parameter = owner.partition('/')
            return (f'the update rule of /{parameter}' if parameter else
                    f'optimizer {name!r}') + (
                f' is {now}, in the snapshot it is {was}')
    return ''


def lost_rules(saved: State, current: State) -> str:
    """What to say of parameters that have no update rule any more."""
    lost = {parameter_of(key) for key in below('optimizer/', saved)} - {
        parameter_of(key) for key in below('optimizer/', current)} - {''}
    return (f'{", ".join(sorted(lost))} had an update rule in the snapshot, '
            'and have none in the script: they are not updated any more'
            if lost else '')


def restore_optimizers(state: State, trainer: chainer.training.Trainer
                       ) -> list[Restored]:
    """Gives optimizers the state of :func:`collect_optimizers`.

    Call it after the trainer, and so the optimizers, were deserialized.

    Returns:
        The values that are others in the script, for
        :func:`extend_with_script_values`.  They are set, but for those that
        the script has changed since the run began.
    """
    restored = []
    parameters = {name + place: parameter for name, optimizer
                  in trainer.updater.get_all_optimizers().items()
                  for place, parameter in optimizer.target.namedparams()}
    for key, owner in owners(trainer):
        if f'{key}/values' in state:
            _, now, changed, arrays = state[f'{key}/values'].item()
            script = copy.deepcopy(_kept(owner)[0])
            first = {} if changed is None else {**now, **changed}
            _first[owner] = copy.deepcopy({
                name: first.get(name, value)
                for name, value in script.items()})
            for name, value in now.items():
                one = Restored(key, owner, name, script.get(name, _NONE),
                               first.get(name, _NONE), value)
                if one.holder is not None and not _same(one.script, value):
                    restored.append(one)
                    if not one.is_edited:
                        one.set(value)
            for number, name in enumerate(arrays):
                holder, attribute = _split(owner, name)
                if holder is not None:
                    _set_array(holder, attribute,
                               state[f'{key}/array{number}'])
        if (master := state.get(f'{key}/float32')) is not None:
            parameter = parameters[key]
            owner._fp32_param = chainer.Parameter(
                parameter.xp.asarray(master), name=parameter.name)
        if any(value is None for value in (
                getattr(owner, 'state', None) or {}).values()):
            # It had no state yet; it makes one at its first update.
            owner._state = None
    return restored


class Restored:
    """A value that a snapshot has, and the script another one."""

    def __init__(self, key: str, owner: Any, name: str, script: Any,
                 first: Any, value: Any) -> None:
        self.key, self.owner, self.name = key, owner, name
        self.script, self.first, self.value = script, first, value
        self.holder, self._attribute = _split(owner, name)
        #: Whether the script has changed it since the run began.
        self.is_edited = not (script is _NONE or first is _NONE
                              or _equal(script, first))

    @property
    def now(self) -> Any:
        """The present value."""
        return vars(self.holder).get(self._attribute, _NONE)

    def set(self, value: Any) -> None:
        """Sets it, in place, as others may refer to it."""
        now, value = self.now, copy.deepcopy(value)
        if type(now) is type(value) is list:
            now[:] = value
        elif type(now) is type(value) is dict:
            now.clear()
            now.update(value)
        else:
            setattr(self.holder, self._attribute, value)


def extend_with_script_values(
        trainer: chainer.training.Trainer, restored: list[Restored],
        is_told: Callable[[str], bool]) -> None:
    """Has a trainer's extensions initialised with the script's values.

    Args:
        trainer: Was resumed, and has not run yet.
        restored: Of :func:`restore_optimizers`.
        is_told: Whether this rank warns about an owner, by its key.
    """
    def before() -> None:
        """Gives the script's values back, but for what was set since."""
        restored[:] = [one for one in restored if _same(
            one.now, one.script if one.is_edited else one.value)]
        for one in restored:
            if one.script is not _NONE:
                one.set(one.script)

    def after() -> None:
        """Sets the snapshot's values, but for what the script has changed.

        If an extension has set one, that is what the script says; the first
        value is as extensions have left it, too.
        """
        for one in restored:
            if (one.is_edited if one.first is _NONE
                    or _equal(one.now, one.script) else
                    not (_equal(one.now, one.first)
                         or _equal(one.now, one.value))):
                _first[one.owner][one.name] = copy.deepcopy(one.now)
                if is_told(one.key):
                    warnings.warn(
                        f'{one.name.removeprefix("hyperparam.")} of '
                        f'{one.key} is {one.now!r} in the script, and was '
                        f'{one.first!r} when the run began: the training '
                        'goes on with that of the script, not with '
                        f'{one.value!r} of the snapshot', stacklevel=2)
            else:
                one.set(one.value)
        restored.clear()
    for when, act, priority in (('before', before, float('inf')),
                                ('after', after, float('-inf'))):
        trainer._extensions.pop(f'values {when} extensions', None)
        trainer.extend(training.make_extension(
            initializer=lambda _, act=act: act())(lambda _: None),
            f'values {when} extensions', EveryUpdate(), priority)


def _kept(owner: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values that a snapshot keeps, and the arrays, by their names."""
    values, arrays = {}, {}
    for prefix, holder in holders_of(owner).items():
        for attribute, value in vars(holder).items():
            name = f'{prefix}.{attribute}' if prefix else attribute
            if attribute in _OF_CHAINER:
                continue
            if isinstance(value, chainer.get_array_types()):
                if value.dtype != object:
                    arrays[name] = value
            elif _is_value(value):
                values[name] = value
    return values, arrays


def _split(owner: Any, name: str) -> tuple[Any, str]:
    """The holder that has an attribute now, or None, and its own name."""
    prefix, _, attribute = name.rpartition('.')
    return holders_of(owner).get(prefix), attribute


def _is_value(value: Any) -> bool:
    if type(value) in _SIMPLE:
        return True
    if not isinstance(value, (float, list, tuple, dict, numpy.generic)):
        return False
    try:
        to_json(value)
    except TypeError:
        return False
    return True


def _same(one: Any, other: Any) -> bool:
    return one is other or (
        one is not _NONE and type(one) is type(other)
        and (one == other if type(one) in _SIMPLE
             else to_json(one) == to_json(other)))


def _equal(one: Any, other: Any) -> bool:
    """Also one of NumPy's numbers and Python's."""
    return _same(one, other) or (
        isinstance(one, numbers.Real) and isinstance(other, numbers.Real)
        and one == other)


def _set_array(holder: Any, attribute: str, value: numpy.ndarray) -> None:
    now = vars(holder).get(attribute)
    if isinstance(now, chainer.get_array_types()):
        value = chainer.backend.get_device_from_array(now).send(value)
        if (now.shape, now.dtype) == (value.shape, value.dtype):
            now[...] = value        # others may refer to it
            return
    setattr(holder, attribute, value)
