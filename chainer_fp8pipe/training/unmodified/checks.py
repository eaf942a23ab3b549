"""What of an updater cannot be trained over several ranks."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import chainer
from chainer.iterators import (
    MultiprocessIterator,
    MultithreadIterator,
    SerialIterator,
)
from chainer.training.updaters import StandardUpdater
from chainermn.optimizers import (
    _DoubleBufferingOptimizer,
    _MultiNodeOptimizer,
)

from .launch import Refusal

_ITERATORS = SerialIterator, MultiprocessIterator, MultithreadIterator
#: About a script that trains before it has made its updater.
OWN_LOOP = (
    'the script updates its optimizer in a loop of its own; {} needs a '
    'chainer.training.StandardUpdater, whose update() the loop or a Trainer '
    'calls')


class Given(NamedTuple):
    """What a script has given to its updater."""

    iterators: Mapping[str, Any]
    optimizers: Mapping[str, Any]
    loss_func: Any = None

    @property
    def iterator(self) -> Any:
        """The only one, or the first."""
        return next(iter(self.iterators.values()), None)

    @property
    def optimizer(self) -> Any:
        """The only one, or the first."""
        return next(iter(self.optimizers.values()), None)


def given_to(iterator: Any, optimizer: Any, loss_func: Any = None) -> Given:
    """The arguments of a ``StandardUpdater``."""
    iterators, optimizers = (
        one if isinstance(one, Mapping) else {'main': one}
        for one in (iterator, optimizer))
    return Given(iterators, optimizers, loss_func)


def kind(value: Any) -> str:
    """The name of a value's class; of a function: its own."""
    return getattr(value, '__name__', type(value).__name__)


def is_model(function: Any, model: Any) -> bool:
    """Whether a function is the model, or its ``forward``."""
    return function is model or (
        getattr(function, '__self__', None) is model
        and function.__name__ in ('__call__', 'forward'))


def _several(what: str) -> tuple[Callable, Callable]:
    return (lambda given: list(getattr(given, what)) != ['main'],
            lambda given: (
                f'the updater has {len(getattr(given, what))} {what} '
                f'({", ".join(getattr(given, what))}); what is trained over '
                'ranks is one model, with one optimizer and one iterator'))


#: What is refused, and the reason with the remedy, in this order.
_REFUSED: dict[str, tuple[Callable[[Given], bool], Callable[[Given], str]]] = {
    'iterators': _several('iterators'),
    'iterator': (
        lambda given: not isinstance(given.iterator, _ITERATORS),
        lambda given: (
            f'the training data come from a {kind(given.iterator)}; '
            'unmodified scripts are trained with '
            + ', '.join(one.__name__ for one in _ITERATORS))),
    'optimizers': _several('optimizers'),
    'multi-node optimizer': (
        lambda given: isinstance(given.optimizer, (
            _MultiNodeOptimizer, _DoubleBufferingOptimizer)),
        lambda given: (
            "the script's optimizer is ChainerMN's multi-node optimizer; run "
            'it without --pipeline and --plan, or leave '
            'create_multi_node_optimizer out and give --communicator')),
    'optimizer': (
        lambda given: not isinstance(given.optimizer, chainer.GradientMethod),
        lambda given: (
            f'the optimizer is a {kind(given.optimizer)}; several ranks can '
            'train with optimizers of one gradient only '
            '(chainer.GradientMethod)')),
    'model': (
        lambda given: given.optimizer.target is None,
        lambda given: 'the optimizer has no model; call '
        'optimizer.setup(model) before making the updater'),
    'loss': (
        lambda given: given.loss_func is not None and not is_model(
            given.loss_func, given.optimizer.target),
        lambda given: (
            'the updater has a loss function of its own, '
            f'{kind(given.loss_func)}; put it into the model, as in '
            'L.Classifier(net, lossfun=...), and leave loss_func out')),
}


def check(given: Given, names: Iterable[str] = _REFUSED) -> None:
    """Raises ValueError about what cannot be trained over ranks.

    Args:
        given: What the updater was given.
        names: Of the checks.
    """
    for is_wrong, reason in map(_REFUSED.__getitem__, names):
        if is_wrong(given):
            raise ValueError(reason(given))


def check_updater(updater: Any, before: Any, title: str) -> None:
    """Raises Refusal about any but a script's only ``StandardUpdater``."""
    if type(updater) is not StandardUpdater:
        raise Refusal(
            f'the script trains with a {kind(updater)}; {title} needs '
            'chainer.training.updaters.StandardUpdater itself')
    if before is not None:
        raise Refusal(f'the script makes a second updater; {title} is of one '
                      'model with one updater')
