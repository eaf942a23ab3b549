"""Checks that a script can be trained as a pipeline, or as replicas.

Every ``ValueError`` names, in one line, the obstacle in the script and the
remedy.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chainer
from chainer.iterators import (
    MultiprocessIterator,
    MultithreadIterator,
    SerialIterator,
)
from chainer.optimizer_hooks import GradientNoise
from chainermn.optimizers import (
    _DoubleBufferingOptimizer,
    _MultiNodeOptimizer,
)

from ...planning.sizes import counted

_ITERATORS = SerialIterator, MultiprocessIterator, MultithreadIterator


def the_iterator(given: Any) -> Any:
    """The only iterator of an updater."""
    iterator = _only(given, 'iterators')
    if not isinstance(iterator, _ITERATORS):
        names = ', '.join(kind.__name__ for kind in _ITERATORS)
        raise ValueError(
            f'the training data come from a {type(iterator).__name__}; '
            f'unmodified scripts are trained with {names}')
    return iterator


def the_optimizer(given: Any, replicas: int) -> Any:
    """The only optimizer of an updater."""
    optimizer = _only(given, 'optimizers')
    if isinstance(optimizer, (_MultiNodeOptimizer,
                              _DoubleBufferingOptimizer)):
        raise ValueError(
            "the script's optimizer is ChainerMN's multi-node optimizer; run "
            'it without --pipeline and --plan, or leave '
            'create_multi_node_optimizer out and give --communicator')
    if not isinstance(optimizer, chainer.GradientMethod):
        raise ValueError(
            f'the optimizer is a {type(optimizer).__name__}; several ranks '
            'can train with optimizers of one gradient only '
            '(chainer.GradientMethod)')
    if optimizer.target is None:
        raise ValueError('the optimizer has no model; call '
                         'optimizer.setup(model) before making the updater')
    for hook in optimizer._hookable._pre_update_hooks.values():
        if replicas > 1 and isinstance(hook, GradientNoise):
            raise ValueError(
                'GradientNoise would be another one on each replica; leave '
                'it out, or start as many ranks as there are stages')
    return optimizer


def check_loss(loss_func: Any, model: chainer.Link) -> None:
    """Raises ValueError if the loss is not inside of the model."""
    if loss_func is not None and not is_model(loss_func, model):
        name = getattr(loss_func, '__name__', type(loss_func).__name__)
        raise ValueError(
            f'the updater has a loss function of its own, {name}; put it '
            'into the model (a Chain that returns the loss, such as '
            'L.Classifier(net, lossfun=...)) and leave loss_func out')


def is_model(function: Any, model: Any) -> bool:
    """Whether a function is the model, or its ``forward``."""
    return function is model or (
        getattr(function, '__self__', None) is model
        and function.__name__ in ('__call__', 'forward'))


def samples_of(batch_size: int, micro_batches: int, replicas: int) -> int:
    """Number of samples of a micro-batch."""
    found = batch_size // (micro_batches * replicas)
    if not found:
        raise ValueError(
            f'a batch of {counted(batch_size, "sample")} cannot be cut into '
            + counted(micro_batches, 'micro-batch')
            + f' for each of {replicas} replicas' * (replicas > 1)
            + '; lower '
            '--micro-batches (or make a plan for this batch size), or raise '
            'the batch size')
    return found


def _only(given: Any, what: str) -> Any:
    if not isinstance(given, Mapping):
        return given
    if list(given) != ['main']:
        raise ValueError(
            f'the updater has {len(given)} {what} ({", ".join(given)}); '
            'what is trained over ranks is one model, with one optimizer and '
            'one iterator')
    return given['main']
