"""A ChainerMN communicator that exchanges gradients through a codec."""
from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
import weakref
from typing import Any

import chainer
import numpy
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from mpi4py import MPI

from ..codecs import Fp8Ratio, TensorReport
from ..exchange.early import EarlyExchange
from ..exchange.exchange import Exchange, Setup
from ..exchange.gradients import SAME_MODEL, describe, distinct_parameters
from ..exchange.ranks import Ranks
from ..intercept.ready_gradients import PATCHES
from ..mpi.agreement import agree
from ..mpi.watch import updates
from ..report.stream import EventStream
from .algorithms import gather_nodes, make_algorithm
from .options import Options


class CodecCommunicator(MpiCommunicatorBase):
    """ChainerMN's communicator, with this package's gradient exchange.

    Everything but the exchange (``send``, ``bcast``, ``split``, ...) is as
    ChainerMN documents it.  Make one with :func:`create_communicator`.

    Args:
        mpi_comm: The ranks.
        options: Checked options.
        owns_mpi_comm: ``finalize`` frees ``mpi_comm``, too.

    Attributes:
        name: The communicator's name, e.g. ``'fp8'``.
        options: See above.
        events: Bytes and seconds of the exchanges so far, an
            :class:`~chainer_fp8pipe.report.stream.EventStream`.
    """

    def __init__(self, mpi_comm: MPI.Comm, options: Options,
                 owns_mpi_comm: bool = False) -> None:
        self.name, self.options = options.name, options
        self.events = EventStream()
        agree(mpi_comm, options.described(),
              remedy='Pass the same name and options on all ranks.')
        super().__init__(mpi_comm)
        self._process = os.getpid()
        nodes = gather_nodes(mpi_comm, self.inter_rank, self.intra_rank)
        self._setup = Setup(
            Ranks(mpi_comm),
            make_algorithm(mpi_comm, options, nodes, self.events),
            options.row.codec(options, mpi_comm.rank, mpi_comm.size),
            self.events, options)
        self._setup.engine.listen = self._setup.ranks.listen
        # What finalize() calls, the last one first; None afterwards.
        self._ends: contextlib.ExitStack | None = contextlib.ExitStack()
        if owns_mpi_comm:
            self._ends.callback(mpi_comm.Free)
        for end in (self._setup.ranks.free, self._setup.engine.free,
                    self._setup.exchanges.clear):       # they refer to it
            self._ends.callback(end)
        self._kind: type[Exchange] = Exchange
        if _overlap(mpi_comm, options):
            self._kind = EarlyExchange
            for patch in PATCHES:
                self._ends.callback(patch.hold(self))

    # --- what ChainerMN's optimizers call -----------------------------------

    def multi_node_mean_grad(self, model: chainer.Link,
                             zero_fill: bool = False) -> None:
        """Replaces every gradient by its mean over all ranks.

        Parameters that are not initialised are left out, and so are those
        without gradient unless ``zero_fill``.

        Args:
            model: A link; names, shapes and dtypes of its parameters must be
                the same on all ranks.
            zero_fill: Give parameters without gradient one of zeros.

        Raises:
            ValueError: The models differ between ranks, or a parameter
                cannot be averaged; on all ranks, naming rank and parameter.
            RuntimeError: The communicator has been finalized; or a
                gradient is NaN or infinite (unless options say
                otherwise); on all ranks, naming rank and parameter.  If a
                parameter itself is, it may be on its rank only.
            ReplicaDrift: Replicas were compared (option ``check_every``) and
                differ; on all ranks, naming parameter, updates and ranks.
        """
        if self._ends is None:
            raise RuntimeError(
                f'rank {self.rank}: communicator {self.name!r} has been '
                'finalized; make another one by create_communicator')
        setup = self._setup
        with setup.ranks.section():
            # All ranks come here with new models in the same order.
            exchange = self._known(model) or self._make(model)
            if exchange.number < 0:
                exchange.number = setup.models
                setup.models += 1
            exchange.mean(model, zero_fill)
            self.events.updates += 1
            updates.finished((id(setup), exchange.number))

    def watcher(self, model: chainer.Link) -> Any:
        """What sends a model's gradients early; None: nothing does."""
        if self._kind is Exchange or self._ends is None:
            return None
        return self._known(model) or self._make(model)

    def bcast_data(self, model: chainer.Link) -> None:
        """Gives every rank the parameters of rank 0, bit for bit.

        Raises:
            ValueError: The models differ between ranks; on all ranks.
        """
        parameters = distinct_parameters(model)
        agree(self.mpi_comm, {
            f'parameter {name}': describe(parameter.array)
            for name, parameter in parameters}, remedy=SAME_MODEL)
        if self._kind is EarlyExchange:
            with self._setup.ranks.section():
                (self._known(model) or self._make(model)).withdraw()
        for _, parameter in parameters:
            if parameter.array is not None:
                host = numpy.array(
                    chainer.backends.cuda.to_cpu(parameter.array), order='C')
                self.mpi_comm.Bcast(host.reshape(-1).view(numpy.uint8))
                parameter.array[...] = parameter.xp.asarray(host)
        updates.broadcast()

    def split(self, color: int, key: int) -> CodecCommunicator:
        """A communicator of the same kind for each ``color``.

        It starts afresh: warm-up, scales and residuals are its own.

        Raises:
            ValueError: The communicator has aggregators; the message says
                what to do.
        """
        if self.options.algorithm == 'aggregator':
            raise ValueError(
                f'the aggregators serve all {self.size} workers together; '
                'make a part of them a communicator without: '
                'create_communicator(name, mpi_comm=comm.mpi_comm.Split('
                'color, key))')
        return type(self)(
            self.mpi_comm.Split(color, key), dataclasses.replace(
                self.options, ranks_per_node=0, shape=(0, 0)),
            owns_mpi_comm=True)

    def finalize(self) -> None:
        """Frees what was allocated in MPI; call it on all ranks.

        MPI has room for some 2,000 communicators.  A second call does nothing,
        nor does one after ``MPI.Finalize`` or in a fork.
        """
        if self._ends is None or os.getpid() != self._process:
            return
        ends, self._ends = self._ends, None
        if not MPI.Is_finalized():
            ends.close()
            super().finalize()

    # --- figures and state of a model ----------------------------------------

    def report(self, model: chainer.Link) -> dict[str, TensorReport]:
        """Reports on every tensor of a model so far, by the parameter's name.

        Raises:
            TypeError: The codec is not fp8.
        """
        codec = self._setup.codec
        if not isinstance(codec, Fp8Ratio):
            raise TypeError(f'communicator {self.name!r} has no fp8 codec')
        exchange = self._known(model)
        return codec.report(exchange.state) if exchange else {}

    def state(self, model: chainer.Link) -> dict[str, numpy.ndarray]:
        """Returns this rank's part of what an exact continuation needs.

        Flat arrays by name; for fp8, scales, counters and residuals.  There
        are none as long as the model's gradients have not been averaged.

        Args:
            model: The link that is passed to :meth:`multi_node_mean_grad`,
                an optimizer's target.
        """
        exchange = self._known(model)
        return exchange.save() if exchange else {}

    def load_state(self, state: dict[str, numpy.ndarray],
                   model: chainer.Link) -> None:
        """Restores what :meth:`state` returned.

        Args:
            state: Of a model with the same parameters.
            model: Whose state it is from now on.

        Raises:
            ValueError: It is of another kind of communicator.
        """
        (self._known(model) or self._make(model)).load(state)

    # --- details ------------------------------------------------------------

    def _known(self, model: chainer.Link) -> Exchange | None:
        """The model's exchange, of this very object; None if it is new."""
        found = self._setup.exchanges.get(id(model))
        return found if found and found.model() is model else None

    def _make(self, model: chainer.Link) -> Exchange:
        exchanges, key = self._setup.exchanges, id(model)

        def forget(dead: weakref.ref[chainer.Link]) -> None:
            # Another model may be there by now.
            if key in exchanges and exchanges[key].model is dead:
                del exchanges[key]
        made = self._kind(weakref.ref(model, forget), self._setup)
        exchanges[key] = made
        return made

    def _init_ranks(self) -> None:
        per_node = self.options.ranks_per_node
        if not per_node:
            super()._init_ranks()
            return
        if self.size % per_node:
            raise ValueError(f'ranks_per_node={per_node} does not divide the '
                             f'{self.size} ranks')
        self._intra_rank = self.rank % per_node
        self._intra_size = per_node
        self._inter_rank = self.rank // per_node
        self._inter_size = self.size // per_node


def _overlap(comm: MPI.Comm, options: Options) -> bool:
    if not options.overlap:
        return False
    # Threads of all ranks must be allowed to call MPI at any time.
    if comm.allreduce(MPI.Query_thread(), MPI.MIN) >= MPI.THREAD_MULTIPLE:
        return True
    if comm.rank == 0:
        warnings.warn(
            'overlap=True has no effect, as MPI was started without '
            'MPI_THREAD_MULTIPLE: gradients are exchanged after backward',
            RuntimeWarning, stacklevel=3)
    return False
