"""``partition``: an unmodified Chain over the ranks of a pipeline."""
from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import chainer
import numpy

from ..mpi.agreement import Signature, agree, raise_together
from ..mpi.link_speed import measure_links
from ..pipeline.grid import ProcessGrid
from ..pipeline.once import once
from ..planning.cuts import DoesNotFit, Task, Wire
from ..planning.layouts import layouts, table
from ..planning.plan import Plan, load_plan
from ..planning.positions import order_of
from ..planning.search import search
from ..planning.sizes import parse_bytes
from .adapting import Adapter
from .ghost import is_ghost
from .moving import take_away
from .names import Names, parameters_of
from .parameters import draw, settle, without_shapes
from .partitioned import Partition, check_loss, reads_state
from .partitioned_chain import PartitionedChain, class_of
from .program import Program
from .trace import Trace, Tracer

#: Bytes that a rank takes whatever it computes: code, buffers of BLAS and MPI,
#: Python's objects of a graph.
_OVERHEAD = 16e6
#: Seconds in which Python packs and unpacks a message.
_PACKING = 5e-5


@without_shapes(always=False)
def partition(model: Any, example: Any, comm: Any, *, memory: Any = None,
              micro_batches: int = 4, schedule: str = '1f1b',
              chunks: int = 1, recompute: Any = 'auto',
              optimizer_arrays: int = 2, plan: Any = None,
              profile: int = 3) -> Any:
    """Cuts a model over ranks, so that stages take equally long and fit.

    Call it on all ranks, with the whole model, as it is written: any
    ``chainer.Chain`` that returns its loss.  From then on each rank has the
    parameters that it uses; train it with :class:`PipelineUpdater`.

    Every rank runs the model's own ``forward`` for each micro-batch; a call
    of a function that another rank does gives a ghost, a variable with shape
    and dtype only.  Loss and gradients are those of serial training on the
    same micro-batches.

    Args:
        model: With its values (those of the first rank count), or made in
            :func:`deferred`.
        example: One micro-batch as the converter gives it: an array, a tuple
            of arrays or a dictionary; on all ranks, of the same shapes.
        comm: The ranks: a communicator of mpi4py's or ChainerMN's, all of
            whose ranks become stages, or a :class:`ProcessGrid`.
        memory: What a rank may use beyond the interpreter: bytes, or a text
            such as ``'2 GiB'``; None: no limit.
        micro_batches: Into how many a batch will be cut; the same as for
            :class:`PipelineUpdater`.
        schedule: As for :class:`PipelineUpdater`.
        chunks: Chunks of each rank, for ``'interleaved'``.
        recompute: ``'auto'``: stages that would not fit keep their inputs
            only and run forward twice; True: all stages; False: none.
        optimizer_arrays: How many arrays of a parameter's size the
            optimizer keeps: 2 for Adam, 1 for momentum, 0 for SGD.
        plan: Where to cut, as an earlier run has saved it with
            ``model.plan.save('plan.json')``: the file's path, what is in
            the file, or a :class:`~chainer_fp8pipe.planning.Plan`; None:
            the best cut is searched for.
        profile: After so many updates, the first of which is not counted,
            the plan is made again with the times that calls take in
            training, and parameters move to other ranks if a step is faster
            by 10 % then; 0, or a given plan: never.

    Returns:
        The model itself; ``print(model)`` shows the cut.

    Raises:
        DoesNotFit: No cut fits into the memory; on all ranks.
        ValueError: An argument is wrong, ranks have different models, or the
            model's own ``forward`` looks at computed data, which need not be
            on the rank (:func:`atomic` helps); on all ranks.
    """
    grid = _grid(comm)
    limit = raise_together(grid.comm, lambda: _check(
        model, memory, recompute, optimizer_arrays), error=ValueError)
    call = functools.partial(model, *_arguments(example)[0],
                             **_arguments(example)[1])
    names, tracer, trace = _traced(model, call, grid, error=ValueError)
    raise_together(grid.comm, lambda: check_loss(trace), error=ValueError)
    task = Task(grid.stages, micro_batches, schedule, chunks, limit,
                _copies(optimizer_arrays), recompute, _wire(grid.pipeline),
                _OVERHEAD)
    found = _plan(names, trace, task, plan, grid)
    live = reads_state(tracer, trace, call)
    program = raise_together(grid.comm, lambda: Program(
        trace, found, None, live), error=ValueError)
    part = Partition(model, names, tracer, found, grid, program)
    part.live_state['train'] = live
    part.limit = limit
    part.describe(program)
    part.adapter = (Adapter(part, trace, task, profile)
                    if profile and plan is None and grid.stages > 1
                    else None)
    _distribute(names, part, grid)
    model.partition = part
    kind: Any = type(model)
    model.__class__ = class_of(kind)
    return model


@without_shapes(always=True)
def choose_grid(model: Any, example: Any, comm: Any, *, memory: Any = None,
                micro_batches: int = 4, schedule: str = '1f1b',
                recompute: Any = 'auto', optimizer_arrays: int = 2,
                gradient_bytes: float = 4.0, show: bool = True
                ) -> ProcessGrid:
    """Stages and replicas that are expected to be fastest.

    Call it on all ranks, with the model that :func:`partition` will get.
    The first rank prints a table of all factorisations of the ranks.

    Args:
        model: As for :func:`partition`; it stays whole.
        example: As for :func:`partition`.
        comm: All ranks: a communicator of mpi4py's or ChainerMN's.
        memory: As for :func:`partition`.
        micro_batches: Of a whole batch; replicas divide them among
            themselves.
        schedule: As for :func:`partition`.
        recompute: As for :func:`partition`.
        optimizer_arrays: As for :func:`partition`.
        gradient_bytes: Of a number between replicas: 4, or 1 for fp8.
        show: Whether to print the table.

    Returns:
        A grid for :func:`partition` and :class:`PipelineUpdater`.

    Raises:
        DoesNotFit: No layout fits into the memory; on all ranks.
        ValueError: An argument is wrong, or ranks have other models; on all
            ranks.
    """
    whole = _grid(comm)
    limit = raise_together(whole.comm, lambda: _check(
        model, memory, recompute, optimizer_arrays), error=ValueError)
    args, kwargs = _arguments(example)
    names, _, trace = _traced(model, functools.partial(
        model, *args, **kwargs), whole, error=ValueError)
    task = Task(whole.stages, micro_batches, schedule, 1, limit,
                _copies(optimizer_arrays), recompute, _wire(whole.comm),
                _OVERHEAD)
    found = whole.comm.bcast(layouts(
        trace.calls, order_of(trace.calls, list(names.parameters)),
        parameters_of(names), task, whole.comm.size, gradient_bytes)
        if whole.comm.rank == 0 else None)
    best = found[0]
    if show and whole.comm.rank == 0:
        print(table(found))
    if best.seconds is None:
        raise DoesNotFit(f'no layout of {whole.comm.size} ranks: '
                         f'{best.reason}')
    return ProcessGrid(comm, pipeline=best.stages)


def _wire(comm: Any) -> Wire:
    """The links between stages, as they are measured."""
    speed = measure_links(comm)
    return Wire(speed.latency + _PACKING, speed.bandwidth)


def _grid(comm: Any) -> ProcessGrid:
    if isinstance(comm, ProcessGrid):
        return comm
    return once(getattr(comm, 'mpi_comm', comm), 'one pipeline',
                lambda: ProcessGrid(comm, pipeline=comm.size))


def _check(model: Any, memory: Any, recompute: Any,
           optimizer_arrays: Any) -> float | None:
    if isinstance(model, PartitionedChain):
        raise ValueError('this model was cut already; build it anew')
    if hasattr(model, 'pieces'):
        raise ValueError('a Divisible is cut by its stage(comm); partition() '
                         'is for other Chains')
    if not isinstance(model, chainer.Link):
        raise TypeError('partition() takes a chainer.Link, not '
                        f'{type(model).__name__}')
    if recompute not in ('auto', True, False):
        raise ValueError("recompute must be 'auto', True or False, not "
                         f'{recompute!r}')
    if not isinstance(optimizer_arrays, int) or optimizer_arrays < 0:
        raise ValueError('optimizer_arrays must be a number of at least 0, '
                         f'not {optimizer_arrays!r}')
    return parse_bytes(memory)


def _arguments(example: Any) -> tuple[tuple, dict[str, Any]]:
    if isinstance(example, tuple):
        return example, {}
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example,), {}


def _copies(optimizer_arrays: int) -> float:
    """Arrays of a parameter's size: the value, the sum of gradients, and
    the optimizer's."""
    return 2.0 + optimizer_arrays


def _traced(model: Any, call: Any, grid: ProcessGrid,
            error: type[Exception]) -> tuple[Names, Tracer, Trace]:
    names = Names(model)
    tracer = Tracer(model, names)
    # The first rank takes times; the others wait, to leave it the cores.
    with chainer.using_config('train', True), \
            chainer.using_config('enable_backprop', True):
        traces: list[Trace] = []
        for turn in (True, False):
            def take(turn: bool = turn) -> None:
                if (grid.comm.rank == 0) == turn:
                    traces.append(tracer.trace(call, timed=turn))
            raise_together(grid.comm, take, error=error)
    trace, = traces
    agree(grid.comm, Signature({'the trace of the model': trace.digest}),
          remedy='Build the same model on all ranks, and give partition() '
          'examples of the same shapes; what a model calls must not depend '
          'on the rank.')
    return names, tracer, trace


def _plan(names: Names, trace: Trace, task: Task, given: Any,
          grid: ProcessGrid) -> Plan:
    """The first rank's plan, or what was given to the first rank."""
    comm = grid.comm

    def make() -> dict[str, Any] | None:
        if comm.rank:
            return None
        if given is not None:
            plan = load_plan(given)
            _check_plan(plan, names, task)
            return plan.as_dict()
        order = order_of(trace.calls, list(names.parameters))
        return search(trace.calls, order, parameters_of(names),
                      task).as_dict()
    found, problem = None, None
    try:
        found = make()
    except Exception as error:
        problem = error
    answer = comm.bcast((found, problem))
    if answer[1] is not None:
        raise answer[1]
    return load_plan(answer[0])


def _check_plan(plan: Plan, names: Names, task: Task) -> None:
    if plan.stages != task.stages:
        raise ValueError(f'the plan is for {plan.stages} stages, and there '
                         f'are {task.stages}')
    for group in plan.order:
        for name in group:
            if name not in names.parameters:
                raise ValueError(f'the plan knows a parameter {name}, which '
                                 'the model has not')


def _distribute(names: Names, part: Partition, grid: ProcessGrid) -> None:
    """Gives each rank its parameters' values, and takes away the others'.

    Values that were not deferred are those of the first rank.
    """
    comm = grid.comm
    _number_alike(names, comm)
    # As in serial training: what gets its shape in forward is drawn last.
    for name in sorted(names.parameters, key=lambda name: (
            names.shaped.index(name) + 1 if name in names.shaped else 0)):
        parameter = names.parameters[name]
        array = parameter._data[0]
        mine = name in part.own
        if array is None:               # its link makes it, in forward
            continue
        deferred = is_ghost(array) and hasattr(parameter, '_draw_from')
        if deferred:
            if mine:
                draw(parameter)
        else:
            _send_first(comm, parameter, mine)
        if not mine:
            take_away(name, parameter)
    for link in names.links.values():
        for name in sorted(link._persistent):
            value = vars(link)[name]
            if isinstance(value, numpy.ndarray):
                value[...] = comm.bcast(value if comm.rank == 0 else None)


def _number_alike(names: Names, comm: Any) -> None:
    """Deferred values are drawn as on the first rank.

    Links make copies of themselves in the order of sets, which each process
    has its own of.
    """
    drawn_from = comm.bcast({
        name: getattr(parameter, '_draw_from', None)
        for name, parameter in names.parameters.items()})
    for name, parameter in names.parameters.items():
        if drawn_from[name] is not None:
            parameter._draw_from = drawn_from[name]


def _send_first(comm: Any, parameter: chainer.Parameter, mine: bool) -> None:
    if comm.rank == 0 and is_ghost(parameter._data[0]):
        draw(parameter)
    array = parameter._data[0]
    host = numpy.empty(array.shape, array.dtype)
    if comm.rank == 0:
        host[...] = chainer.backends.cuda.to_cpu(array)
    if comm.size > 1:
        comm.Bcast(host.reshape(-1).view(numpy.uint8))
    if mine:
        settle(parameter, parameter._initial_device.send(host)
               if is_ghost(array) else _like(host, array))


def _like(host: numpy.ndarray, array: Any) -> Any:
    array[...] = chainer.backend.get_array_module(array).asarray(host)
    return array
