"""The state of optimizers that Chainer does not serialize.

Hyperparameters (a learning rate that an extension has changed), also those of
single parameters, the dynamic loss scale, and the float32 copies of float16
parameters (``use_fp32_update``).
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chainer
import numpy

State = dict[str, numpy.ndarray]
_LOSS_SCALE = ('_loss_scale', '_loss_scaling_isnan_ever')


def below(prefix: str, state: State) -> State:
    """The part of a state whose keys start with ``prefix``, without it."""
    return {key[len(prefix):]: value for key, value in state.items()
            if key.startswith(prefix)}


def collect_optimizers(trainer: chainer.training.Trainer) -> State:
    """The state of every optimizer, with keys below its name."""
    state: State = {}
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        # ChainerMN's proxy has the real one inside.
        actual = getattr(optimizer, 'actual_optimizer', optimizer)
        state[f'{name}/class'] = numpy.asarray(type(actual).__name__)
        for key, value in _own(getattr(optimizer, 'hyperparam', None)):
            state[f'{name}/hyperparam/{key}'] = value
        for key in _LOSS_SCALE:
            number = getattr(optimizer, key, None)
            if number is not None:
                state[f'{name}/scaling/{key}'] = _from_number(number)
        for place, rule in _rules(optimizer):
            for key, value in _own(rule.hyperparam):
                state[f'{name}/rule/{key}{place}'] = value
            if rule._fp32_param is not None:
                state[f'{name}/float32{place}'] = (
                    chainer.backends.cuda.to_cpu(rule._fp32_param.array))
    return state


def restore_optimizers(state: State,
                       trainer: chainer.training.Trainer) -> None:
    """Restores the state of :func:`collect_optimizers`.

    Call it after the trainer, and so the optimizers, were deserialized.
    """
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        rules = dict(_rules(optimizer))
        parameters = dict(optimizer.target.namedparams())
        for rule in rules.values():
            if any(value is None for value in (rule.state or {}).values()):
                # It had no state yet; it makes one at its first update.
                rule._state = None
        for key, value in below(f'{name}/', state).items():
            kind, _, rest = key.partition('/')
            if kind == 'hyperparam':
                setattr(optimizer.hyperparam, rest, _to_number(value))
            elif kind == 'scaling':
                setattr(optimizer, rest, _to_number(value))
            elif kind == 'rule':
                attribute, _, place = rest.partition('/')
                setattr(rules['/' + place].hyperparam, attribute,
                        _to_number(value))
            elif kind == 'float32':
                parameter = parameters['/' + rest]
                rules['/' + rest]._fp32_param = chainer.Parameter(
                    parameter.xp.asarray(value), name=parameter.name)


def parameter_of(key: str) -> str:
    """The parameter that a key of :func:`collect_optimizers` is about.

    With the optimizer's name, as in ``main/l1/W``; '' if the key is about the
    optimizer as a whole.
    """
    name, _, key = key.partition('/')
    kind, _, rest = key.partition('/')
    if kind == 'rule':
        rest = rest.partition('/')[2]
    elif kind != 'float32':
        return ''
    return f'{name}/{rest}'


def _rules(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """The update rules, by the names of their parameters."""
    for name, parameter in optimizer.target.namedparams():
        if (rule := getattr(parameter, 'update_rule', None)) is not None:
            yield name, rule


def _own(hyperparam: Any) -> Iterator[tuple[str, numpy.ndarray]]:
    """The numbers in this set of hyperparameters, without its parent's."""
    for key, value in vars(hyperparam).items() if hyperparam else ():
        if isinstance(value, (int, float, numpy.number)):
            yield key, _from_number(value)


# Python's and NumPy's numbers are told apart by their dimensions: a learning
# rate of numpy.float64 makes float64 of what it is multiplied with (since
# NumPy 2), and so other bits than Python's float.

def _from_number(value: Any) -> numpy.ndarray:
    return numpy.array([value] if isinstance(value, numpy.number) else value)


def _to_number(array: numpy.ndarray) -> Any:
    return array[0] if array.ndim else array.item()
