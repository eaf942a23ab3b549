"""What of a script cannot be trained over several ranks, in one table."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
_MEANS = _MultiNodeOptimizer, _DoubleBufferingOptimizer


def _kind(value: Any) -> str:
    return getattr(value, '__name__', type(value).__name__)


#: By what is looked at: whether it is refused, and the sentence, in which {}
#: is its kind, with the remedy.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    'updater': (
        lambda updater: type(updater) is not StandardUpdater,
        'the script trains with a {}; several ranks need '
        'chainer.training.updaters.StandardUpdater itself'),
    'other_updater': (
        lambda updater: updater is not None,
        'the script makes a second updater beside its {}; several ranks '
        'train one model with one updater'),
    'own_loop': (
        lambda updater: updater is None,
        'the script updates its optimizer in a loop of its own; several '
        'ranks need a chainer.training.StandardUpdater, whose update() the '
        'loop or a Trainer calls'),
    'iterator': (
        lambda iterator: not isinstance(iterator, _ITERATORS),
        'the training data come from a {}; unmodified scripts are trained '
        'with ' + ', '.join(map(_kind, _ITERATORS))),
    'mean': (
        lambda optimizer: isinstance(optimizer, _MEANS),
        "the script's optimizer is ChainerMN's multi-node optimizer; run it "
        'without --pipeline and --plan, or leave create_multi_node_optimizer '
        'out and give --communicator'),
    'optimizer': (
        lambda optimizer: not isinstance(optimizer, chainer.GradientMethod),
        'the optimizer is a {}; several ranks can train with optimizers of '
        'one gradient only (chainer.GradientMethod)'),
    'model': (
        lambda model: model is None,
        'the optimizer has no model; call optimizer.setup(model) before '
        'making the updater'),
    'loss_func': (
        lambda function: function is not None,
        'the updater has a loss function of its own, {}; put it into the '
        'model, as in L.Classifier(net, lossfun=...), and leave loss_func '
        'out'),
}


def check(**seen: Any) -> None:
    """Raises Refusal about what cannot be trained over ranks.

    Args:
        seen: What the script has made, by the table's names.
    """
    for name, value in seen.items():
        is_refused, sentence = _REFUSED[name]
        if is_refused(value):
            raise Refusal(sentence.format(_kind(value)))


def the_only(given: Any, what: str) -> Any:
    """The only iterator or optimizer of an updater, or Refusal."""
    found = given if isinstance(given, Mapping) else {'main': given}
    if list(found) != ['main']:
        raise Refusal(
            f'the updater has {len(found)} {what} ({", ".join(found)}); what '
            'is trained over ranks is one model, with one optimizer and one '
            'iterator')
    return found['main']


def loss_of(function: Any, model: Any) -> Any:
    """A loss function; None if it is the model or its ``forward``."""
    is_model = function is model or (
        getattr(function, '__self__', None) is model
        and function.__name__ in ('__call__', 'forward'))
    return None if is_model else function
