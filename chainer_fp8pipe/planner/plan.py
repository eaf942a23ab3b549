"""``plan``: measures a job, and chooses how to run it."""
# What becomes of a model and a batch:
#   model_figures   seconds and bytes of its calls; how ranks slow each other
#   exchange_times  means of gradients and links of every layout
#   Choices         all ways, ranked by the formula of planning.step
#   trials          the first five, naive and one process, for some updates
#   JobPlan         the fastest of what was run, with all of this as reasons
# The first rank ranks and chooses; all measure and try.
from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chainer
import chainer.functions as F
from mpi4py import MPI

from ..chains.valueless_parameters import without_shapes
from ..communicators.options import make_options
from ..links.divisible import Divisible
from ..mpi.abort import enter_world
from ..mpi.agreement import agree, of_first_rank, raise_together
from ..mpi.placement import divisors
from ..mpi.ranks import nodes_of
from ..planning.choices import Choices, Wanted
from ..planning.job_plan import (
    TRIED,
    USUAL_CODECS,
    Configuration,
    JobPlan,
    Timing,
)
from ..planning.step import JobProfile
from ..report.quantities import parse_bytes
from .example import Example
from .exchange_times import measure_layouts
from .layered import Layered
from .model_figures import growth, measure_model, resident
from .planned_job import PlannedJob, mpi_of, shapes_of
from .trials import Blocks, Trained, preferred, try_all, try_way

#: Parts of the time: for exchanges, and for each trial.
_OF_EXCHANGES, _OF_A_TRIAL = 0.3, 0.06
#: Copies of the parameters that must fit beside a model for it to be tried.
_COPIES = 7


def plan(model: Any, example: Any, comm: Any = None, *,
         batch: int | None = None, memory: Any = None, optimizer: Any = None,
         codecs: Sequence[str] = USUAL_CODECS, stages: Sequence[int] = (),
         ranks: int | None = None,
         budget: float = 16.0, show: bool = False, data: Any = None,
         loss_fun: Callable[..., Any] = F.softmax_cross_entropy
         ) -> PlannedJob:
    """Finds the fastest way to train a model on these ranks.

    Measures the model, exchanges and links (some 10 seconds), and ranks every
    way to run the job.  The first five that fit into memory, ChainerMN's
    ``naive`` and one process are run for some updates on copies of the model.
    The plan is the fastest of these.  Call it on all ranks; the model stays as
    it is.  A model that :func:`chainer_fp8pipe.partition` cannot cut is
    planned with replicas only.

    Args:
        model: The whole model, as it is written; it returns its loss.  Or a
            ``Divisible``, which need not be built, and of which nothing is
            tried.
        example: A batch of one rank, as the converter gives it: an array, a
            tuple of arrays or a dictionary.  For a ``Divisible`` a tuple,
            the target last.
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
            same way; None: for these.  Nothing is tried then.
        budget: Seconds in which exchanges are measured and ways are tried,
            about; with less time, figures are less certain.
        show: Whether the first rank prints the plan and, on the standard
            error stream, what is being measured.
        data: What ways are tried with in place of the example, a
            :class:`~.example.Data`; None: the example.
        loss_fun: Of a ``Divisible``, as for ``PipelineUpdater``:
            ``loss_fun(*outputs, target)``.

    Returns:
        The plan, the same on all ranks.

    Raises:
        DoesNotFit: No way fits into the memory; on all ranks.
        ValueError: An argument is wrong, or ranks have other models; on all
            ranks.
    """
    enter_world()
    comm = mpi_of(comm)
    if isinstance(model, Divisible):
        model = raise_together(comm, lambda: Layered(model, loss_fun),
                               error=ValueError)
    samples, wanted = _checked(comm, model, example, optimizer, {
        'batch': batch, 'memory': memory, 'codecs': codecs,
        'stages': stages, 'ranks': ranks, 'budget': budget})
    trained = Trained(model, optimizer or chainer.optimizers.Adam(), samples,
                      wanted.batch, data)

    def say(what: str) -> None:
        if show and comm.rank == 0:
            print(f'chainer_fp8pipe plan: {what}', file=sys.stderr,
                  flush=True)
    profile = measure(comm, trained, wanted, budget, say, ranks)
    if profile.model.undivided:
        if wanted.stages and 1 not in wanted.stages:
            raise ValueError(profile.model.undivided)
        wanted = wanted._replace(stages=(1,))
    choices: list[Choices] = []         # on the first rank

    def ranked() -> list[Configuration]:
        choices.append(Choices(profile, wanted))
        return choices[0].promising()
    ways = of_first_rank(comm, ranked)
    found: list[tuple[Configuration, Timing]] = []
    remarks = _why_untried(model, wanted, comm.size, profile.ranks)
    if not remarks:
        found, remarks = _tried(ways, trained, comm, say, budget)
    job = PlannedJob(of_first_rank(comm, lambda: _chosen(
        choices[0], ways, found, remarks)), samples)
    if show and comm.rank == 0:
        print(job, flush=True)
    return job


def measure(comm: MPI.Comm, trained: Trained, wanted: Wanted,
            budget: float = 16.0,
            say: Callable[[str], None] = lambda what: None,
            ranks: int | None = None) -> JobProfile:
    """All that is measured of a job; call it on all ranks.

    Args:
        comm: All ranks.
        trained: Model, optimizer and data.
        wanted: What the user asks for.
        budget: As for :func:`plan`.
        say: Is told what is being measured.
        ranks: As for :func:`plan`.
    """
    before, model = resident(), trained.model
    say(f'measuring the model with a batch of {trained.example.samples}')
    with without_shapes(model.params()):
        figures, slowdown, spare = measure_model(
            comm, model, trained.example, trained.optimizer,
            max(1, wanted.batch // comm.size // 4), _has_room(model, wanted))
    say(f'measuring {", ".join(wanted.codecs)} exchanges and links')
    # For other ranks all layouts: two stages here may leave no replicas, whose
    # exchange two stages there need.
    stages = [number for number in divisors(comm.size)
              if (not wanted.stages or ranks or number in wanted.stages)
              and (number == 1 or not figures.undivided)] or [1]
    exchanges, links = measure_layouts(
        comm, stages, wanted.codecs, figures.elements,
        budget * _OF_EXCHANGES)
    reading = comm.bcast(raise_together(
        comm, trained.data.seconds) if trained.data else 0.0)
    return JobProfile(
        figures, tuple(nodes_of(comm)), slowdown, exchanges, links, spare,
        reading, comm.allreduce(growth(before), MPI.MAX)
        ).for_ranks(ranks or comm.size)


# --- choosing ---------------------------------------------------------------

def _tried(ways: Sequence[Configuration], trained: Trained,
           comm: MPI.Comm, say: Callable[[str], None], budget: float
           ) -> tuple[list[tuple[Configuration, Timing]], list[str]]:
    """Tries all ways, and one process."""
    begin, seconds = time.perf_counter(), budget * _OF_A_TRIAL

    def run(way: Configuration, limit: float) -> Blocks:
        return try_way(way, trained, comm, seconds, limit)
    found, remarks = try_all(
        ways, run, say,
        lambda: comm.bcast(budget - (time.perf_counter() - begin)))
    if comm.size > 1:       # which does not say which others are near
        alone, problems = try_all([Configuration()], run, say)
        found, remarks = found + alone, remarks + problems
    return found, remarks


def _chosen(choices: Choices, ways: Sequence[Configuration],
            found: Sequence[tuple[Configuration, Timing]],
            remarks: Sequence[str]) -> JobPlan:
    """The plan of the fastest way that was tried, or that is predicted."""
    count = choices.profile.ranks
    possible = [one for one in found
                if one[0].stages * one[0].replicas == count]
    taken = preferred(possible) if possible else ways[0]
    fastest = min((one.seconds for _, one in possible), default=0.0)
    said = [*remarks, *(
        f'one process is faster than any way on these {count} ranks '
        f'({1e3 * alone.seconds:.4g} ms): run the script without mpiexec'
        for way, alone in found if way.stages * way.replicas < count
        and alone.seconds < fastest)]
    if taken.replicas > 1 and not taken.is_exact and possible and (
            warmup := getattr(make_options(taken.codec, {}), 'warmup', 0)):
        said.append(f'the first {warmup} updates of {taken.codec} travel in '
                    'float32 (warmup); what was tried is what follows')
    return choices.plan(taken, [trial for _, trial in found], said)


def _why_untried(model: Any, wanted: Wanted, here: int, ranks: int
                 ) -> list[str]:
    """The remark if no way can be tried."""
    reasons = {
        'the model is a Divisible': isinstance(model, Layered),
        'the plan is for other ranks': here != ranks,
        'copies of the model do not fit into the memory beside it':
            not _has_room(model, wanted)}
    return [f'no way was tried, as {reason}'
            for reason, is_so in reasons.items() if is_so][:1]


def _has_room(model: Any, wanted: Wanted) -> bool:
    """Whether copies with gradients and activations fit beside a model."""
    size = 4.0 * sum(math.prod(shape) for shape in shapes_of(model).values()
                     if shape is not None)
    return wanted.memory is None or _COPIES * size < wanted.memory


# --- arguments --------------------------------------------------------------

def _checked(comm: MPI.Comm, model: Any, example: Any, optimizer: Any,
             given: Mapping[str, Any]) -> tuple[Example, Wanted]:
    """Checks the arguments, and that they are the same on all ranks."""
    def check() -> tuple[Example, Wanted]:
        if not isinstance(model, chainer.Link):
            raise TypeError('plan() takes a chainer.Link, not '
                            f'{type(model).__name__}')
        if getattr(model, 'partition', None) is not None:
            raise ValueError('this model was cut already; build it anew')
        if optimizer is not None and not isinstance(
                optimizer, chainer.Optimizer):
            raise TypeError('optimizer must be a chainer.Optimizer, not '
                            f'{type(optimizer).__name__}')
        samples = Example(example)
        return samples, _wanted(comm.size, samples.samples, **given)
    found = raise_together(comm, check, error=ValueError)
    agree(comm, {
        **{name: repr(value) for name, value in {
            **given, **found[1]._asdict()}.items()},
        'the model': repr(shapes_of(model)),
        'the samples of the example': str(found[0].samples)},
        remedy='Pass the same to plan() on all ranks.')
    return found


def _wanted(here: int, samples: int, *, batch: Any, memory: Any, codecs: Any,
            stages: Any, ranks: Any, budget: Any) -> Wanted:
    for name, value in (('ranks', ranks), ('batch', batch)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f'{name} must be a number of at least 1, not '
                             f'{value!r}')
    count = here if ranks is None else ranks
    if count > 1 and here == 1:
        raise ValueError(
            f'ranks={count} cannot be planned on one rank, which has no link '
            'to measure: start the plan on 2 ranks or more')
    if not isinstance(budget, (int, float)) or not 0 < budget < math.inf:
        raise ValueError('budget must be seconds, more than 0, not '
                         f'{budget!r}')
    unknown = sorted(set(codecs) - set(TRIED))
    if unknown or not codecs:
        raise ValueError(
            f'codecs must be some of {", ".join(TRIED)}, not '
            f'{", ".join(map(repr, unknown)) or "none"}')
    for one in stages:
        if not isinstance(one, int) or one < 1 or count % one:
            raise ValueError(f'stages={one!r} does not divide the {count} '
                             'ranks')
    return Wanted(batch or samples * count, parse_bytes(memory),
                  tuple(codecs), tuple(stages))
