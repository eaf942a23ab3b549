"""``plan``: measures a job, chooses how to run it, and sets that up."""
from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chainer
import chainer.functions as F
from mpi4py import MPI

from ..chains.names import Names
from ..chains.partition import partition
from ..chains.valueless_parameters import without_shapes
from ..communicators import create_communicator
from ..links.divisible.divisible import Divisible
from ..mpi.agreement import Signature, agree, raise_together
from ..mpi.failure.world import enter_world
from ..mpi.grid import ProcessGrid
from ..mpi.once import once
from ..planning.job.choices import Choices, Wanted
from ..planning.job.configuration import (
    CODECS,
    USUAL_CODECS,
    Configuration,
)
from ..planning.job.job_plan import (
    JobPlan,
    Trial,
    load_job_plan,
    plan_of,
)
from ..planning.job.job_profile import (
    CodecFigures,
    JobProfile,
    ModelFigures,
    NetworkFigures,
)
from ..planning.sizes import parse_bytes
from . import own_memory
from .codec.codec_rates import measure_codecs
from .codec.message_costs import measure_local_messages
from .core_sharing import CoreSharing
from .example import Example
from .layers.layer_figures import check_whole, measure_layers
from .layers.layer_shapes import layer_counts, layer_shapes
from .model_figures import measure_model
from .network.links import measure_network
from .scripts.plan_file import read_plan
from .trials import preferred, promising, try_one_process, try_way

#: Parts of the time for measuring; the rest is for codecs.
_OF_LINKS, _OF_MESSAGES = 0.55, 0.05
#: What each trial takes besides, as a part of that time.
_OF_A_TRIAL = 0.1


class PlannedJob:
    """A plan, and what it sets up: communicator, grid, partition.

    Args:
        plan: A :class:`~chainer_fp8pipe.planning.job.job_plan.JobPlan`, the
            path of a file that one was saved in, or its content.
        example: For :meth:`partition`; None: given there.

    Raises:
        ValueError: There is no such file, or it is no plan that can be
            carried out; the message names file, field and remedy.

    Attributes:
        plan: The plan.
    """

    def __init__(self, plan: Any, example: Any = None) -> None:
        self.plan: JobPlan = (read_plan(plan) if isinstance(plan, str)
                              else load_job_plan(plan))
        self._example = example

    def __str__(self) -> str:
        return str(self.plan)

    def save(self, path: str) -> None:
        """Writes the plan to a JSON file, which can be edited."""
        self.plan.save(path)

    def check(self, comm: MPI.Comm, model: Any = None) -> None:
        """Raises an error unless the plan is for this job and model.

        Raises:
            ValueError: It is for another one; on all ranks.
        """
        planned = self.plan.model
        agree(comm, Signature({}), self.plan.problem(
            planned if model is None else shapes_of(model, planned),
            comm.size))

    def grid(self, comm: Any = None) -> ProcessGrid:
        """The grid of stages and replicas; call it on all ranks.

        Args:
            comm: All ranks; None: ``MPI.COMM_WORLD``.
        """
        comm = _mpi(comm)
        self.check(comm)
        return once(comm, f'grid of {self.plan.choice.stages} stages',
                    lambda: ProcessGrid(
                        comm, pipeline=self.plan.choice.stages))

    def communicator(self, comm: Any = None, **options: Any) -> Any:
        """The communicator of the replicas; call it on all ranks.

        Args:
            comm: All ranks; None: ``MPI.COMM_WORLD``.
            options: Of :func:`create_communicator`, beside the plan's.
        """
        choice, comm = self.plan.choice, _mpi(comm)
        if choice.stages > 1:
            comm = self.grid(comm).data
        else:
            self.check(comm)
        return create_communicator(choice.codec, comm, **{
            **choice.communicator_options(), **options})

    def partition(self, model: Any, example: Any = None, comm: Any = None,
                  **options: Any) -> Any:
        """Cuts the model as planned; without stages it stays whole.

        Call it on all ranks; train with
        ``PipelineUpdater(..., plan.grid(comm))``.

        Args:
            model: The one that the plan was made with.
            example: One micro-batch; None: of the example of :func:`plan`.
                A ``Divisible`` needs none.
            comm: All ranks; None: ``MPI.COMM_WORLD``.
            options: Of :func:`chainer_fp8pipe.partition`, beside the plan's.

        Returns:
            The model; of a ``Divisible`` this rank's stage.

        Raises:
            ValueError: The plan is for another model; on all ranks.
        """
        choice, comm = self.plan.choice, _mpi(comm)
        self.check(comm, model)
        if choice.stages == 1:
            return model
        if isinstance(model, Divisible):
            return self._staged(model, comm)
        if example is None:
            if self._example is None:
                raise ValueError('a plan from a file has no example; pass '
                                 'partition(model, example)')
            example = self._example.of(max(1, round(
                self.plan.batch / choice.replicas / choice.micro_batches)))
        return partition(model, example, self.grid(comm), **{
            'micro_batches': choice.micro_batches,
            'schedule': choice.schedule, 'plan': choice.cut,
            'chunks': choice.cut.chunks if choice.cut else 1, **options})

    def _staged(self, model: Divisible, comm: MPI.Comm) -> Any:
        cut = self.plan.choice.cut
        assert cut is not None
        counts = raise_together(
            comm, lambda: layer_counts(cut, model.total), error=ValueError)
        part = model.stage(self.grid(comm), counts, cut.chunks)
        part.plan = cut         # for PipelineUpdater
        return part


def plan(model: Any, example: Any, comm: Any = None, *,
         batch: int | None = None, memory: Any = None, optimizer: Any = None,
         codecs: Sequence[str] = USUAL_CODECS,
         stages: Sequence[int] = (), ranks: int | None = None,
         torus: tuple[int, int] | None = None, budget: float = 16.0,
         loss_fun: Callable = F.softmax_cross_entropy,
         show: bool = False) -> PlannedJob:
    """Finds the fastest way to train a model on these ranks.

    Measures links, codecs and the model (some 20 seconds), predicts a step of
    every way to run the job, and takes the fastest that fits into memory.
    Call it on all ranks; the model stays as it is.  A model that
    :func:`chainer_fp8pipe.partition` cannot cut is planned with replicas
    only.

    Args:
        model: The whole model, as it is written; it returns its loss.  Or a
            ``Divisible``, which is planned layer by layer and need not be
            built.
        example: A batch of one rank, as the converter gives it: an array, a
            tuple of arrays or a dictionary.  For a ``Divisible`` a tuple, the
            target last.
        comm: All ranks: a communicator of mpi4py's or ChainerMN's; None:
            ``MPI.COMM_WORLD``.
        batch: Samples of an update, of all ranks together; None: those of
            the example, times the ranks.
        memory: What a rank may use beyond the interpreter: bytes, or a text
            such as ``'2 GiB'``; None: no limit.
        optimizer: That will train the model, set up or not; None: Adam.
        codecs: Communicators that may be chosen; ``('float32',)``: exact
            ones only.
        stages: Numbers of stages that may be chosen; (): all that divide
            the ranks.
        ranks: Plan for so many ranks, as if they were added to these in the
            same way; None: for these.
        torus: Rows and columns, if the hosts are wired as a torus and
            numbered row by row; None: around a switch.
        budget: Seconds in which links and codecs are measured, about; with
            less time, figures are less certain.
        loss_fun: Of a ``Divisible``, as for ``PipelineUpdater``:
            ``loss_fun(*outputs, target)``.
        show: Whether the first rank prints the plan and, on the standard
            error stream, what is being measured.

    Returns:
        The plan, the same on all ranks.

    Raises:
        DoesNotFit: No way fits into the memory; on all ranks.
        ValueError: An argument is wrong, or ranks have other models; on all
            ranks.
        RuntimeError: A link between two ranks does not answer.
    """
    enter_world()
    comm = _mpi(comm)
    samples, wanted = _checked(comm, model, example, batch, memory, optimizer,
                               codecs, stages, ranks, (torus, budget))

    def say(what: str) -> None:
        if show and comm.rank == 0:
            print(f'chainer_fp8pipe plan: {what}', file=sys.stderr,
                  flush=True)
    profile = measure(model, samples, comm, wanted, optimizer, say, torus,
                      budget, loss_fun)
    if profile.model.undivided:
        if wanted.stages and 1 not in wanted.stages:
            raise ValueError(profile.model.undivided)
        wanted = wanted._replace(stages=(1,))
    if ranks is not None:
        profile = profile.for_ranks(ranks)

    choices: list[Choices] = []         # the first rank's

    def choose() -> tuple[JobPlan, list[Configuration]] | None:
        if comm.rank:
            return None
        choices.append(Choices(profile, wanted))
        return plan_of(choices[0]), promising(choices[0].candidates)
    chosen, ways = _fitting(comm, choose)
    if (comm.size == profile.ranks and not isinstance(model, Divisible)
            and _has_room(model, wanted)):
        chosen = _tried(choices, chosen, ways, model,
                        optimizer or _usual_optimizer(), samples, comm, say,
                        budget * _OF_A_TRIAL)
    made = PlannedJob(chosen.as_dict(), samples)
    if show and comm.rank == 0:
        print(made, flush=True)
    return made


@without_shapes(always=True)
def measure(model: Any, example: Example, comm: MPI.Comm, wanted: Wanted,
            optimizer: Any = None,
            say: Callable[[str], None] = lambda what: None,
            torus: tuple[int, int] | None = None, budget: float = 16.0,
            loss_fun: Callable = F.softmax_cross_entropy) -> JobProfile:
    """All that is measured of a job; call it on all ranks.

    Args:
        model: The whole model.
        example: Samples of one rank.
        comm: All ranks.
        wanted: What the user asks for.
        optimizer: That will train the model; None: Adam.
        say: Is told what is being measured.
        torus, budget, loss_fun: As for :func:`plan`.
    """
    optimizer = optimizer or _usual_optimizer()
    copies = _has_room(model, wanted)
    before = own_memory.resident()
    say(f'measuring the model with a batch of {example.samples}')
    few = max(1, wanted.batch // comm.size // 4)
    figures, sharing = (
        measure_layers(comm, model, example, loss_fun, optimizer, few, copies)
        if isinstance(model, Divisible) else
        measure_model(comm, model, example, optimizer, few, copies))
    say('measuring the links between the ranks')
    network = measure_network(comm, budget * _OF_LINKS, torus)
    if not network.between_hosts:
        # Messages of compiled code, which keep a rank busy for less time.
        local = measure_local_messages(comm, budget * _OF_MESSAGES)
        if local is not None:
            network = dataclasses.replace(
                network, message_cost=local.message, byte_cost=local.byte)
    sharing.visit()
    say(f'measuring {", ".join(wanted.codecs)} exchanges')
    codecs = measure_codecs(comm, wanted.codecs, budget * (
        1 - _OF_LINKS - _OF_MESSAGES))
    sharing.visit()
    sharing.forget_work()
    profile = profile_of(network, codecs, figures, sharing)
    return dataclasses.replace(
        profile, overhead=comm.allreduce(own_memory.growth(before), MPI.MAX))


def profile_of(network: NetworkFigures, codecs: Mapping[str, CodecFigures],
               figures: ModelFigures, sharing: CoreSharing) -> JobProfile:
    """A profile of figures that were found one after the other.

    Args:
        network: Of the links.
        codecs: By name, measured while all ranks work.
        figures: Of a rank alone, but for the update, of all ranks at once.
        sharing: After its last visit.
    """
    crowded = sharing.crowding      # which the engine puts back
    return JobProfile(
        network, sharing.cores, {
            name: dataclasses.replace(one, rates={
                operation: rate._replace(value=rate.value * crowded)
                for operation, rate in one.rates.items()})
            for name, one in codecs.items()},
        figures.slower(sharing.drift, 1 / crowded), sharing.speeds,
        straggling=sharing.straggling,
        remarks=('no pipeline, as the model cannot be cut: '
                 + figures.undivided,) if figures.undivided else ())


def _has_room(model: Any, wanted: Wanted) -> bool:
    """Whether two copies with gradients and activations fit beside it."""
    size = 4.0 * sum(math.prod(shape) for shape in shapes_of(model).values()
                     if shape is not None)
    return wanted.memory is None or 7 * size < wanted.memory


def _usual_optimizer() -> chainer.Optimizer:
    return chainer.optimizers.Adam()


def _tried(choices: Sequence[Choices], chosen: JobPlan,
           ways: Sequence[Configuration], model: Any, optimizer: Any,
           example: Example, comm: MPI.Comm, say: Callable[[str], None],
           seconds: float) -> JobPlan:
    """The plan of the way that is the fastest where it was tried."""
    naive = Configuration(comm.size, codec='naive')
    if comm.size > 1 and any(way.stages == 1 for way in ways):
        ways = [*ways, naive]
    found, remarks = [], list(chosen.remarks)
    for way in ways:
        say(f'trying {way}')
        job = PlannedJob(dataclasses.replace(chosen, choice=way), example)
        trial = try_way(way, job, model, optimizer, example, chosen.batch,
                        comm, seconds)
        if isinstance(trial, str):
            remarks.append(f'{way} was not tried: {trial}')
        else:
            found.append((way, trial))
    if not found:
        return dataclasses.replace(chosen, remarks=tuple(remarks))
    taken, measured = found[preferred(found)]
    if taken == naive:          # of which nothing is predicted
        chosen = dataclasses.replace(
            chosen, choice=taken, seconds=measured.seconds,
            spread=measured.spread, parts={}, memory=())
    else:
        chosen = comm.bcast(plan_of(choices[0], taken) if choices else None)
    trials = [trial for _, trial in found]
    if comm.size > 1 and chosen.memory_limit is None:
        say('trying one process')
        alone = try_one_process(model, optimizer, example, chosen.batch, comm,
                                seconds)
        if isinstance(alone, Trial):
            trials.append(alone)
            if alone.seconds * (1 + alone.spread) < measured.seconds:
                remarks.append(
                    'one process is faster than any way on these '
                    f'{comm.size} ranks ({1e3 * alone.seconds:.4g} ms): run '
                    'the script without mpiexec')
    return dataclasses.replace(
        chosen, remarks=tuple(remarks), trials=tuple(
            sorted(trials, key=lambda one: one.seconds)))


def _checked(comm: MPI.Comm, model: Any, example: Any, batch: Any,
             memory: Any, optimizer: Any, codecs: Any, stages: Any,
             ranks: Any, measuring: tuple[Any, Any]) -> tuple[Example, Wanted]:
    """Checks the arguments, and that they are the same on all ranks."""
    def check() -> tuple[Example, Wanted]:
        if not isinstance(model, chainer.Link):
            raise TypeError('plan() takes a chainer.Link, not '
                            f'{type(model).__name__}')
        if getattr(model, 'partition', None) is not None:
            raise ValueError('this model was cut already; build it anew')
        if isinstance(model, Divisible):
            check_whole(model, example)
        if optimizer is not None and not isinstance(
                optimizer, chainer.Optimizer):
            raise TypeError('optimizer must be a chainer.Optimizer, not '
                            f'{type(optimizer).__name__}')
        samples = Example(example)
        count = comm.size if ranks is None else ranks
        for name, value in ('ranks', count), ('batch', batch):
            if value is not None and (not isinstance(value, int)
                                      or value < 1):
                raise ValueError(f'{name} must be a number of at least 1, '
                                 f'not {value!r}')
        _check_measuring(comm.size, count, *measuring)
        unknown = sorted(set(codecs) - set(CODECS))
        if unknown or not codecs:
            raise ValueError(
                f'codecs must be some of {", ".join(CODECS)}, not '
                f'{", ".join(map(repr, unknown)) or "none"}')
        wrong = [one for one in stages if not isinstance(one, int)
                 or one < 1 or count % one]
        if wrong:
            raise ValueError(f'stages={wrong[0]!r} does not divide the '
                             f'{count} ranks')
        return samples, Wanted(
            batch or samples.samples * count, parse_bytes(memory),
            tuple(codecs), tuple(stages))
    found = raise_together(comm, check, error=ValueError)
    agree(comm, Signature({
        'what is asked for': repr(found[1]), 'ranks': repr(ranks),
        'torus and budget': repr(measuring),
        'the model': repr(shapes_of(model)),
        'the samples of the example': str(found[0].samples)}),
        remedy='Pass the same to plan() on all ranks.')
    return found


def _check_measuring(here: int, ranks: int, torus: Any, budget: Any) -> None:
    if ranks > 1 and here == 1:
        raise ValueError(
            f'ranks={ranks} cannot be planned on one rank, which has no link '
            'to measure: start the plan on 2 ranks or more')
    if torus is not None and ranks != here:
        raise ValueError(
            f'torus={torus} is for the {here} ranks that measure, not for '
            f'ranks={ranks}: leave one of them out')
    if not isinstance(budget, (int, float)) or not 0 < budget < math.inf:
        raise ValueError('budget must be seconds, more than 0, not '
                         f'{budget!r}')
    if torus is not None and len(torus) != 2:
        raise ValueError(f'torus must be rows and columns, not {torus!r}')


def _fitting(comm: MPI.Comm, choose: Any) -> Any:
    """What the first rank finds; its error, of its class, on all ranks."""
    found: Any = None
    try:
        found = choose()
    except Exception as error:
        found = error
    found = comm.bcast(found)
    if isinstance(found, Exception):
        raise found
    return found


def _mpi(comm: Any) -> MPI.Comm:
    return MPI.COMM_WORLD if comm is None else getattr(comm, 'mpi_comm', comm)


def shapes_of(model: Any, planned: Mapping[str, Any] | None = None
              ) -> dict[str, Any]:
    """Of all parameters, by path; None: unknown yet.

    Args:
        model: A Chain, or a ``Divisible``, of which nothing is built.
        planned: What a plan says; of layers that are not built this counts.
    """
    if isinstance(model, Divisible):
        return layer_shapes(model, planned or {})
    return {name: None if one._data[0] is None else one._data[0].shape
            for name, one in Names(model).parameters.items()}
