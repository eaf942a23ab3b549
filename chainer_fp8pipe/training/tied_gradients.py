"""Gradients of parameters that several stages use."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import chainer
import numpy
from mpi4py import MPI

from ..mpi.grid import ProcessGrid
from ..mpi.waiting import wait_until


class TiedGradients:
    """Sums the gradients of a parameter over the stages that have it.

    The first of its stages, its home, gets the sum, which is averaged there
    over replicas, and gives the mean back: so the copies stay the same, bit
    for bit, also where gradients are compressed.

    ``ties`` has the stages of each tied parameter of this rank, by its
    ``id``; the order of ``parameters`` is the same on all ranks.
    """

    def __init__(self, grid: ProcessGrid,
                 ties: Mapping[int, tuple[int, ...]],
                 parameters: list[chainer.Parameter]) -> None:
        self._comm: MPI.Comm = grid.pipeline
        self._stage, self._replicas = grid.stage_index, grid.replicas
        self._tied = [(parameter, ties[id(parameter)])
                      for parameter in parameters if id(parameter) in ties]
        self._ids = set(ties)

    def but(self, final: Callable | None) -> Callable | None:
        """``final`` for the parameters of which nothing is to be added."""
        if final is None or not self._ids:
            return final

        def call(parameter: chainer.Parameter, gradient: Any) -> None:
            if id(parameter) not in self._ids:
                final(parameter, gradient)
        return call

    def add_up(self) -> None:
        """Sums at home; without replicas gives the sums back at once."""
        for parameter, stages in self._tied:
            self._gather(parameter, stages)
        if self._replicas == 1:
            self._scatter()

    def hand_back(self) -> None:
        """Gives what home has, the mean over replicas, to the others."""
        if self._replicas > 1:
            self._scatter()

    def _gather(self, parameter: chainer.Parameter,
                stages: tuple[int, ...]) -> None:
        home, *others = stages
        if self._stage != home:
            self._send(parameter.grad, home)
            if self._replicas > 1:
                parameter.cleargrad()   # nothing to average here
            return
        for stage in others:
            gradient = self._receive(parameter, stage)
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:               # the buffer of the sums
                parameter.grad += gradient

    def _scatter(self) -> None:
        for parameter, (home, *others) in self._tied:
            if self._stage == home:
                for stage in others:
                    self._send(parameter.grad, stage)
            else:
                # Into the gradient that has been sent, where that can be.
                own = parameter.grad
                parameter.grad = self._receive(
                    parameter, home, own if isinstance(own, numpy.ndarray)
                    and own.flags.c_contiguous else None)

    def _send(self, gradient: Any, stage: int) -> None:
        has = numpy.array([gradient is not None])
        self._comm.Send(has, stage)
        if gradient is not None:
            self._comm.Send(numpy.ascontiguousarray(
                chainer.backends.cuda.to_cpu(gradient)), stage)

    def _receive(self, parameter: chainer.Parameter, stage: int,
                 into: Any = None) -> Any:
        has = numpy.empty(1, bool)
        wait_until(self._comm.Irecv(has, stage).Test)
        if not has[0]:
            return None
        host = (numpy.empty(parameter.shape, parameter.dtype)
                if into is None else into)
        wait_until(self._comm.Irecv(host, stage).Test)
        return parameter.device.send(host)
