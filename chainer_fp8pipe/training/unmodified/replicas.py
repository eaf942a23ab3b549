"""Runs an unmodified script on all ranks, each with the whole model."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import chainer
import chainermn
import numpy

from ...mpi.grid import ProcessGrid
from ...pipeline.randomness import preserved
from ..updaters.replica_updater import ReplicaUpdater, arguments_of
from . import files
from .script_run import PipelineJob


class ReplicaJob(PipelineJob):
    """Turns a script's ``StandardUpdater`` into a :class:`.ReplicaUpdater`.

    As :class:`.PipelineJob` else: rank 0's initial values, order of the data
    and validation set count, and rank 0 alone prints and writes.  Each rank
    trains the model by plain Chainer, whatever its ``forward`` does.
    """

    title = 'a replica'
    divides = False

    def make_evaluator(self, original: Callable, evaluator: Any, *args: Any,
                       **kwargs: Any) -> None:
        original(evaluator, *args, **kwargs)
        if self.comm.rank:
            evaluator._progress_bar = False

    def load(self, original: Callable, file: Any, obj: Any, *args: Any,
             **kwargs: Any) -> None:
        if isinstance(obj, chainer.training.Trainer):
            files.load(self, original, file, obj, *args, **kwargs)
        else:
            files.load_everywhere(self.comm, original, file, obj, *args,
                                  **kwargs)

    def _build(self, updater: Any, given: dict[str, Any]) -> None:
        iterator, optimizer, samples = self._checked(given)
        model = optimizer.target
        _, input_device = self._devices(given, model)
        self._check_model(model)
        self.grid = ProcessGrid(self.comm, pipeline=1)
        if not all(one.is_initialized for one in model.params()):
            initialise(model, self._example(
                iterator, samples, given['converter'], input_device))
        optimizer = chainermn.create_multi_node_optimizer(
            optimizer, self._make_communicator(self.comm))
        self._as_on_rank_0(optimizer)
        updater.__class__ = ReplicaUpdater
        ReplicaUpdater.__init__(updater, **{
            **given, 'iterator': self._divided(iterator),
            'optimizer': optimizer, 'comm': self.comm})
        self.updater = updater

    def _as_on_rank_0(self, optimizer: Any) -> None:
        """Gives all ranks rank 0's values, and random numbers of their own.

        The optimizer would spend its first update on it.
        """
        model = optimizer.target
        optimizer.is_changed(model)         # not from now on
        optimizer.communicator.bcast_data(model)
        for link in model.links():
            for name in sorted(link._persistent):
                value = vars(link)[name]
                if isinstance(value, chainer.get_array_types()):
                    value[...] = link.xp.asarray(self.comm.bcast(
                        chainer.backends.cuda.to_cpu(value)))
        seed = self._seed()
        if self.comm.rank:      # the first one's are those of a serial run
            numpy.random.seed([seed, self.comm.rank])


def initialise(model: chainer.Link, example: Any) -> None:
    """Initialises parameters that get their shape in a forward pass.

    They are drawn as in the first forward pass of a training; nothing else
    of the model changes.

    Args:
        model: Returns its loss.
        example: A batch as the converter gives it.
    """
    clone = copy.deepcopy(model)
    args, kwargs = arguments_of(example)
    with chainer.using_config('train', True), chainer.no_backprop_mode():
        clone(*args, **kwargs)
    drawn = dict(clone.namedparams())
    with preserved():
        for name, parameter in model.namedparams():
            if not parameter.is_initialized:
                parameter.copydata(drawn[name])
