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

import contextlib
import copy
import numbers
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chainer
import numpy
from chainer import training

from ..extensions.update_marks import EveryUpdate
from .file import State, object_array, to_json

# What Chainer's serializers save, and what refers to other objects.
_OF_CHAINER = frozenset(('t', 'epoch', 'target', '_state', '_parent'))
_SIMPLE = frozenset((type(None), bool, int, str, float))
_NONE = object()            # where there is no value
# The values with which a training began, by optimizer or update rule.
_first: weakref.WeakKeyDictionary[Any, dict[str, Any]] = (
    weakref.WeakKeyDictionary())


def below(prefix: str, state: State) -> State:
    """The part of a state whose keys start with ``prefix``, without it."""
    return {key[len(prefix):]: value for key, value in state.items()
            if key.startswith(prefix)}


def owners(trainer: training.Trainer) -> Iterator[tuple[str, Any]]:
    """All optimizers and update rules, by their keys.

    ``main`` is an optimizer, ``main/l1/W`` the rule of a parameter.
    """
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        # ChainerMN's proxy has the real one inside.
        yield name, getattr(optimizer, 'actual_optimizer', optimizer)
        for place, parameter in optimizer.target.namedparams():
            if (rule := getattr(parameter, 'update_rule', None)) is not None:
                yield name + place, rule


def attributes_of(owner: Any) -> dict[str, dict[str, Any]]:
    """The attributes of an owner, its hyperparameters and its hooks.

    By what stands before their names.
    """
    found = {'': vars(owner)}
    if getattr(owner, 'hyperparam', None) is not None:
        found['hyperparam.'] = vars(owner.hyperparam)
    hooks = getattr(owner, '_hookable', None)
    for name, hook in () if hooks is None else (
            *hooks._pre_update_hooks.items(),
            *hooks._post_update_hooks.items()):
        # One that another one calls; a method's object has no attributes.
        hook = getattr(hook, '_hook', getattr(hook, '__func__', hook))
        if hasattr(hook, '__dict__'):
            found[f'hook {name}.'] = vars(hook)
    return found


def _kept(owner: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values that a snapshot keeps, and the arrays, by their names."""
    values, arrays = {}, {}
    for prefix, attributes in attributes_of(owner).items():
        for attribute, value in attributes.items():
            if attribute in _OF_CHAINER:
                continue
            if type(value) in _SIMPLE:      # as most: thousands of them
                values[prefix + attribute] = value
            elif isinstance(value, (list, tuple, dict, numpy.generic)):
                with contextlib.suppress(TypeError):
                    to_json(value)
                    values[prefix + attribute] = copy.deepcopy(value)
            elif isinstance(value, chainer.get_array_types()) and (
                    value.dtype != object):
                arrays[prefix + attribute] = value
    return values, arrays


def note_first_values(trainer: training.Trainer) -> None:
    """Notes with which values a training begins, unless that is known.

    Call it when extensions have been initialised.
    """
    for _, owner in owners(trainer):
        if owner not in _first:
            _first[owner] = _kept(owner)[0]


def collect_optimizers(trainer: training.Trainer) -> State:
    """The state of every optimizer, with keys below its name.

    Of each owner, such as ``main/l1/W``: ``float32``, ``array0`` and so on,
    and ``values``: the name of its class, its values, those of the beginning
    that are others now (None: they were not noted), and the arrays' names.
    """
    state: State = {}
    for key, owner in owners(trainer):
        now, arrays = _kept(owner)
        changed = {name: value for name, value in _first[owner].items()
                   if not _equal(value, now.get(name, _NONE))
                   } if owner in _first else None
        state[f'{key}/values'] = object_array(
            (type(owner).__name__, now, changed, [*arrays]))
        found = {f'array{number}': array
                 for number, array in enumerate(arrays.values())}
        if getattr(owner, '_fp32_param', None) is not None:
            found['float32'] = owner._fp32_param.array
        state.update({f'{key}/{name}': chainer.backends.cuda.to_cpu(array)
                      for name, array in found.items() if array is not None})
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


class Difference(NamedTuple):
    """A value that a snapshot has, and the script another one."""

    key: str                        # of the owner
    owner: Any
    name: str                       # such as hyperparam.lr
    attributes: dict[str, Any]      # that it is one of
    script: Any                     # what it is in the script, in this start
    first: Any                      # what it was when the run began
    saved: Any                      # what it is in the snapshot

    @property
    def now(self) -> Any:
        """The present value."""
        return self.attributes.get(self.name.rpartition('.')[2], _NONE)

    def set(self, value: Any) -> None:
        """Sets a copy of a value; no value changes nothing."""
        if value is not _NONE:
            _set(self.attributes, self.name, copy.deepcopy(value))

    @property
    def resumed(self) -> Any:
        """The saved value, or the script's if that has changed."""
        is_edited = not (self.script is _NONE or self.first is _NONE
                         or _equal(self.script, self.first))
        return self.script if is_edited else self.saved


def restore_optimizers(state: State, trainer: training.Trainer
                       ) -> list[Difference]:
    """Gives optimizers the state of :func:`collect_optimizers`.

    Call it after the trainer, and so the optimizers, were deserialized.

    Returns:
        The values that are others in the script, for
        :func:`extend_with_script_values`.  They are set, but for those that
        the script has changed since the run began.
    """
    differences = []
    parameters = {name + place: parameter for name, optimizer
                  in trainer.updater.get_all_optimizers().items()
                  for place, parameter in optimizer.target.namedparams()}
    for key, owner in owners(trainer):
        if f'{key}/values' in state:
            _, now, changed, arrays = state[f'{key}/values'].item()
            script = _kept(owner)[0]
            first = {} if changed is None else {**now, **changed}
            _first[owner] = {name: first.get(name, value)
                             for name, value in script.items()}
            places = attributes_of(owner)
            for name, value in (*now.items(), *(
                    (name, state[f'{key}/array{number}'])
                    for number, name in enumerate(arrays))):
                place = places.get(name[:name.rfind('.') + 1])
                was = script.get(name, _NONE)
                if place is None or (
                        type(was) is type(value) and _equal(was, value)):
                    continue
                one = Difference(key, owner, name, place, was,
                                 first.get(name, _NONE), value)
                one.set(one.resumed)
                if name in now:
                    differences.append(one)
        if (master := state.get(f'{key}/float32')) is not None:
            parameter = parameters[key]
            owner._fp32_param = chainer.Parameter(
                parameter.xp.asarray(master), name=parameter.name)
        if any(value is None for value in (
                getattr(owner, 'state', None) or {}).values()):
            # It had no state yet; it makes one at its first update.
            owner._state = None
    return differences


def extend_with_script_values(
        trainer: training.Trainer, differences: list[Difference],
        is_told: Callable[[str], bool]) -> None:
    """Has a trainer's extensions initialised with the script's values.

    Args:
        trainer: Was resumed, and has not run yet.
        differences: Of :func:`restore_optimizers`.
        is_told: Whether this rank warns about an owner, by its key.
    """
    def before(_: Any) -> None:
        """Gives the script's values back, but for what was set since."""
        differences[:] = [one for one in differences
                          if _equal(one.now, one.resumed)]
        for one in differences:
            one.set(one.script)

    def after(_: Any) -> None:
        """Sets the snapshot's values, but for what the script has changed.

        If an extension has set one, that is what the script says; the first
        value is as extensions have left it, too.
        """
        for one in differences:
            if (one.resumed is one.saved
                    if one.first is _NONE or _equal(one.now, one.script) else
                    _equal(one.now, one.first) or _equal(one.now, one.saved)):
                one.set(one.saved)
                continue
            _first[one.owner][one.name] = copy.deepcopy(one.now)
            if is_told(one.key):
                warnings.warn(
                    f'{one.name.removeprefix("hyperparam.")} of {one.key} is '
                    f'{one.now!r} in the script, and was {one.first!r} when '
                    f'the run began; the script counts, not {one.saved!r} of '
                    'the snapshot',
                    stacklevel=2)
        differences.clear()
    for when, act, priority in (('before', before, float('inf')),
                                ('after', after, float('-inf'))):
        trainer._extensions.pop(f'values {when} extensions', None)
        trainer.extend(
            training.make_extension(initializer=act)(lambda _: None),
            f'values {when} extensions', EveryUpdate(), priority)


def _set(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Sets an attribute, in place where it can be: others may refer to it."""
    attribute = name.rpartition('.')[2]
    now = attributes.get(attribute)
    if isinstance(now, chainer.get_array_types()):
        value = chainer.backend.get_device_from_array(now).send(value)
        if (now.shape, now.dtype) == (value.shape, value.dtype):
            now[...] = value
            return
    elif type(now) is type(value) is list:
        now[:] = value
        return
    elif type(now) is type(value) is dict:
        now.clear()
        now.update(value)
        return
    attributes[attribute] = value


def _equal(one: Any, other: Any) -> bool:
    """Also one of NumPy's numbers and Python's."""
    if one is other:
        return True
    if type(one) is type(other) and one is not _NONE:
        # As a text, what is not a number equals itself.
        return (type(one) in _SIMPLE and one == other
                or to_json(one) == to_json(other))
    return (isinstance(one, numbers.Real) and isinstance(other, numbers.Real)
            and one == other)
