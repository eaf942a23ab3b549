"""``partition``: an unmodified Chain over the ranks of a pipeline."""
from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import chainer

from ..mpi.agreement import agree, of_first_rank, raise_together
from ..mpi.grid import ProcessGrid, grid_of
from ..mpi.world import enter_world
from ..pipeline.adapter import samples_of
from ..pipeline.means import why_once
from ..pipeline.randomness import preserved
from ..pipeline.schedules import make_schedule
from ..report import stored
from ..report.quantities import parse_bytes
from . import nested
from .adapter import check_result
from .attributes import Names, generators_of, parameters_of
from .calls import order_of
from .collectives import refuse_plain
from .cuts import CutProblem, Intervals, search
from .deferred import place_array
from .measure import optimizer_arrays
from .partitioned import Partition, PartitionedChain
from .placement import together
from .plan import PartitionPlan
from .program import Program
from .recorder import Recorder, record_example

#: Bytes that each rank takes: code, buffers of BLAS and MPI, Python's objects
#: of a graph.
_OVERHEAD = 16e6


def partition(model: Any, example: Any, comm: Any, *, memory: Any = None,
              micro_batches: int | None = None, schedule: str | None = None,
              chunks: int | None = None, recompute: Any = 'auto',
              optimizer: Any = None, plan: Any = None,
              loss_func: Callable | None = None) -> Any:
    """Cuts a model over ranks, so that stages take equally long and fit.

    Call it on all ranks, with the whole model: any ``chainer.Chain`` that
    returns its loss, a mean over the samples of a batch.  Each rank keeps the
    parameters that it uses.  Train the model with :class:`PipelineUpdater`.

    Args:
        model: With its values (those of the first rank count), or made in
            :func:`deferred`.
        example: One micro-batch as the converter gives it: an array, a tuple
            of arrays or a dictionary, of the same shapes on all ranks.
        comm: The ranks: a communicator of mpi4py's or ChainerMN's, all of
            whose ranks become stages, or a :class:`ProcessGrid`.
        memory: Most memory of a rank beyond the interpreter's: bytes, or a
            text such as ``'2 GiB'``; None: no limit.
        micro_batches: Parts of a batch, 4 by default; the same as for
            :class:`PipelineUpdater`.
        schedule: As for :class:`PipelineUpdater`; by default ``'1f1b'``.
        chunks: Chunks of each rank, for ``'interleaved'``; by default 1.
        recompute: ``'auto'``: stages that would not fit keep their inputs
            only and run forward twice; True: all stages; False: none.
            Never of a model with ``BatchRenormalization`` or
            ``SpectralNormalization``, which move on with every forward pass.
        optimizer: That will train the model, for the memory that it keeps and
            takes, which the first rank measures.  Default: as Adam.
        plan: The cut of ``model.plan.save('plan.json')``: the file's path or
            content, or a :class:`~chainer_fp8pipe.chains.PartitionPlan`;
            only the first rank needs it.  What contradicts it is an error.
            None searches the best cut.
        loss_func: What is called with a batch in place of the model, as
            for Chainer's ``StandardUpdater``: it calls the model, and
            returns the loss.  It must be the same on all ranks.

    Returns:
        The model itself; ``print(model)`` shows the cut.

    Raises:
        DoesNotFit: No cut, or not the plan's, fits into the memory; on all
            ranks.
        ValueError: On all ranks: an argument is wrong, models differ
            between ranks, or ``forward`` reads computed values that may be
            on another rank (:func:`atomic` helps).
    """
    enter_world()
    grid, options = grid_of(comm), {
        name: value for name, value in (
            ('micro_batches', micro_batches), ('schedule', schedule),
            ('chunks', chunks)) if value is not None}
    problem = raise_together(grid.comm, lambda: _problem(
        model, grid.stages, memory, recompute, options, optimizer, loss_func
    ), ValueError, lambda found: {
        **{name: repr(value) for name, value in dataclasses.asdict(
            found).items() if name not in ('copies', 'temporary')},
        'optimizer': type(optimizer).__name__, 'loss_func': repr(
            getattr(loss_func, '__qualname__', type(loss_func)))},
        'Pass the same to partition() on all ranks.')
    has_plan = grid.comm.bcast(plan is not None)
    agree(grid.comm, {}, '' if has_plan or plan is None else
          'a plan is given on this rank, and none on rank 0, whose plan '
          'counts; pass plan= on rank 0, or on all ranks')
    names = together(grid.comm, lambda: Names(model))
    try:
        both = nested.arguments_of(example)
        recorder, program = _recorded(names, loss_func or model, both, grid)
        found = of_first_rank(grid.comm, lambda: _plan(
            recorder, program, plan, options, problem))
        kind: Any = type(model)
        with preserved():
            part, made = together(grid.comm, lambda: (
                Partition(recorder, found, grid, both, loss_func),
                type(kind.__name__, (PartitionedChain, kind), {
                    '__module__': kind.__module__,
                    '__qualname__': kind.__qualname__})))
        part.placement.distribute()
    except BaseException:       # a later forward pass must draw as usual
        for name in names.shaped:
            place_array(names.parameters[name], None)
        raise
    model.partition, model.__class__ = part, made
    return model


def _problem(model: Any, stages: int, memory: Any, recompute: Any,
             options: Mapping[str, Any], optimizer: Any, loss_func: Any
             ) -> CutProblem:
    """Checks arguments; where to search a cut."""
    if isinstance(model, PartitionedChain):
        raise ValueError('this model was cut already; build it anew')
    if hasattr(type(model), 'pieces'):
        raise ValueError('a Divisible is cut by its stage(comm); partition() '
                         'is for other Chains')
    if not isinstance(model, chainer.Link):
        what = (f'the class {model.__name__}' if isinstance(model, type)
                else type(model).__name__)
        raise TypeError(f'partition() takes a chainer.Link, not {what}')
    if loss_func is not None and not callable(loss_func):
        raise TypeError(f'loss_func must be a function, not {loss_func!r}')
    if recompute not in ('auto', True, False):
        raise ValueError("recompute must be 'auto', True or False, not "
                         f'{recompute!r}')
    if not isinstance(optimizer, (chainer.GradientMethod, type(None))):
        raise TypeError('optimizer must be a chainer.GradientMethod, not '
                        f'{type(optimizer).__name__}')
    refuse_plain(model)
    kept, taken = (2, 3.0) if optimizer is None else optimizer_arrays(
        optimizer, chainer.get_dtype(), model.device)
    # The value of a parameter and the sum of its gradients, too.
    problem = CutProblem(
        stages, memory=parse_bytes(memory), recompute=recompute,
        overhead=_OVERHEAD, copies=2 + kept, temporary=taken,
        **{'micro_batches': 4, **options})
    # Checks the others; the search checks the number of stages.
    steps = make_schedule(problem.schedule, 1, problem.micro_batches,
                          problem.chunks)
    return dataclasses.replace(
        problem, micro_batches=steps.micro_batches, chunks=steps.chunks)


def _recorded(names: Names, function: Callable, both: Any, grid: ProcessGrid
              ) -> tuple[Recorder, Program]:
    """The recorder, and the example's program."""
    def record() -> tuple[Recorder, Program]:
        samples_of([*both[0], *both[1].values()], lists=True)
        recorder = Recorder(names, grid.pipeline)
        found = record_example(recorder, function, grid.comm.rank == 0, both)
        check_result(found.result)
        if not found.calls:
            raise ValueError('the model has nothing to cut: no parameter has '
                             'a part in its result; use one rank')
        return recorder, found

    def alike(found: tuple[Recorder, Program]) -> dict[str, str]:
        """The form of what the first rank sends, and of the calls."""
        arrays = {f'parameter {name}': parameter._data[0]
                  for name, parameter in names.parameters.items()} | {
            f'{name!r} of link {path}': getattr(link, name)
            for path, link in names.links.items()
            for name in sorted(link._persistent)}
        return {f"generator {number} of links' random numbers, which needs a "
                'seed,': hex(zlib.crc32(repr(one.__getstate__()).encode()))
                for number, one in enumerate(generators_of(names.links))} | {
            name: f'{array.dtype} {tuple(array.shape)}'
            for name, array in arrays.items() if hasattr(array, 'shape')
            } | found[1].description()
    # The first rank takes times; the others wait, to leave it the cores.
    is_first = grid.comm.rank == 0
    first = together(grid.comm, lambda: record() if is_first else None)
    return raise_together(
        grid.comm, lambda: first or record(), ValueError, alike,
        'Build the same model on all ranks, and give partition() examples of '
        'the same shapes; what a model calls must not depend on the rank.')


def _plan(recorder: Recorder, program: Program, given: Any,
          options: Mapping[str, Any], problem: CutProblem) -> PartitionPlan:
    """The best plan, or what was given."""
    parameters, plan = parameters_of(recorder.names), None
    order, cuts = order_of(program.calls, list(parameters)), None
    hints = recorder.undivided()
    moving = next(filter(None, map(
        why_once, recorder.names.links.values())), '')
    if given is not None:
        plan = stored.load(PartitionPlan, given)
        wanted = {'stages': problem.stages, **options}
        if problem.recompute != 'auto':
            wanted['recompute'] = (bool(
                problem.recompute),) * len(plan.recompute)
        for name, value in wanted.items():
            if value != getattr(plan, name):
                raise ValueError(f'{name} is {value!r}, and the plan is for '
                                 f'{getattr(plan, name)!r}')
        for name in itertools.chain(*plan.order):
            if name not in parameters:
                raise ValueError(f'the plan knows a parameter {name}, which '
                                 'the model has not')
        order, cuts = plan.order, plan.cuts
        problem = dataclasses.replace(problem, **{
            name: getattr(plan, name) for name in (
                'micro_batches', 'schedule', 'chunks', 'recompute')})
        hints = ['or have partition() search a cut, without plan=']
    elif moving and problem.recompute == 'auto':
        problem = dataclasses.replace(problem, recompute=False)
    if moving and (any(plan.recompute) if plan else problem.recompute):
        raise ValueError('a stage would run forward twice, which is wrong '
                         f'for {moving}; pass recompute=False')
    try:        # figures of a plan are of another run, or other cuts
        return search(Intervals(program.calls, order, parameters, cuts),
                      problem)
    except ValueError as error:
        raise type(error)('; '.join([str(error), *hints])) from error
