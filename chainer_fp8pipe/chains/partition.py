"""``partition``: an unmodified Chain over the ranks of a pipeline."""
from __future__ import annotations

import dataclasses
import functools
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import chainer
import numpy

from ..mpi.agreement import agree, of_first_rank, raise_together
from ..mpi.arrays import broadcast_arrays
from ..mpi.grid import ProcessGrid, grid_of
from ..mpi.measured import measure_links
from ..mpi.world import enter_world
from ..pipeline.randomness import preserved
from ..pipeline.schedules import make_schedule
from ..report.quantities import parse_bytes, size
from . import nested
from .attributes import generators_of, set_state, state_of
from .calls import order_of
from .cuts import (
    CutProblem,
    DoesNotFit,
    Intervals,
    Wire,
    rank_bytes,
    search,
)
from .deferred import draw, settle, take_away, without_shapes
from .functions import PLAIN
from .mean_loss import why_no_mean
from .measure import optimizer_arrays as measured_arrays
from .names import Names, parameters_of
from .partitioned import (
    Partition,
    PartitionedChain,
    check_result,
    class_of,
)
from .placeholder import is_placeholder
from .plan import PartitionPlan, load_plan
from .program import Program
from .recorder import Recorder, record_example

#: Bytes that each rank takes: code, buffers of BLAS and MPI, Python's objects
#: of a graph.
_OVERHEAD = 16e6
#: Arrays of a parameter's size without the optimizer's: the value, and the
#: sum of gradients.
_COPIES = 2.0
#: Seconds in which Python packs and unpacks a message.
_PACKING = 5e-5

_together = functools.partial(raise_together, error=ValueError)


def partition(model: Any, example: Any, comm: Any, *, memory: Any = None,
              micro_batches: int | None = None, schedule: str | None = None,
              chunks: int | None = None, recompute: Any = 'auto',
              optimizer_arrays: int | None = None, optimizer: Any = None,
              plan: Any = None, loss_func: Callable | None = None) -> Any:
    """Cuts a model over ranks, so that stages take equally long and fit.

    Call it on all ranks, with the whole model: any ``chainer.Chain`` that
    returns its loss, a mean over the samples of a batch.  Each rank keeps the
    parameters that it uses.  Train the model with :class:`PipelineUpdater`.

    Every rank runs the model's own ``forward`` for each micro-batch.  Calls
    that another rank does give placeholders: variables with a shape and a
    dtype only.  Loss and gradients are those of serial training on the same
    micro-batches.

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
            Never a stage with ``BatchRenormalization`` or
            ``SpectralNormalization``, which move on with every forward pass.
        optimizer_arrays: How many arrays of a parameter's size the
            optimizer keeps: 2 for Adam, 1 for momentum, 0 for SGD.  It is
            taken to need one more while it updates a parameter.  Default: 2.
        optimizer: Instead of that number, the optimizer that will train the
            model, whose memory is measured on the first rank.
        plan: The cut that ``model.plan.save('plan.json')`` has saved in an
            earlier run: the file's path or content, or a
            :class:`~chainer_fp8pipe.chains.PartitionPlan`.  None searches
            the best cut.  Only the first rank needs it.  It says
            ``micro_batches``, ``schedule``, ``chunks`` and ``recompute``;
            what contradicts it is an error.
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
    with without_shapes(model.params() if isinstance(
            model, chainer.Link) else (), always=False):
        grid = grid_of(comm)
        limit = _agreed(grid.comm, 'partition', model, memory, recompute, {
            'micro_batches': micro_batches, 'schedule': schedule,
            'chunks': chunks, 'optimizer_arrays': optimizer_arrays},
            optimizer, loss_func)
        _check_given(plan, grid.comm)
        recorder, program, call = _recorded(
            model, loss_func or model, example, grid)
        names = recorder.names
        arrays, temporary = of_first_rank(
            grid.comm, lambda: _taken_by(optimizer, optimizer_arrays, names,
                                         model.device))
        problem = CutProblem(
            grid.stages, _or(micro_batches, 4), _or(schedule, '1f1b'),
            _or(chunks, 1), limit, _COPIES + arrays, recompute,
            _wire(grid.pipeline), _OVERHEAD, temporary)
        last = grid.comm.size - 1
        # While the first rank searches.
        warning = why_no_mean(
            loss_func or model, example, names) if grid.comm.rank == last and (
                plan or problem.micro_batches * grid.replicas > 1) else ''
        found = _plan(recorder, program, problem, plan, {
            'micro_batches': micro_batches, 'schedule': schedule,
            'chunks': chunks}, grid)
        warning = grid.comm.bcast(warning, last)
        if warning and found.micro_batches * grid.replicas > 1:
            of_first_rank(grid.comm, lambda: warnings.warn(
                warning, stacklevel=4))

        def cut() -> tuple[Partition, Any]:
            kind: Any = type(model)
            with preserved():
                return Partition(model, recorder, found, grid, limit,
                                 call, loss_func), class_of(kind)
        part, kind = _together(grid.comm, cut)
        _distribute(names, part, grid.comm)
        model.partition, model.__class__ = part, kind
        return model


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given


def _wire(comm: Any) -> Wire:
    """The slowest between stages, as measured."""
    latency, bandwidth = measure_links(comm)
    return Wire(latency + _PACKING, bandwidth)


def _agreed(comm: Any, function: str, model: Any, memory: Any,
            recompute: Any, options: Mapping[str, Any],
            optimizer: Any = None, loss_func: Any = None
            ) -> float | None:
    """Checks that arguments are right, and the same on all ranks.

    Returns:
        Bytes that a rank may use; None: no limit.
    """
    def check() -> float | None:
        _check_model(model)
        if loss_func is not None and not callable(loss_func):
            raise TypeError('loss_func must be a function, not '
                            f'{loss_func!r}')
        _check_options(recompute, **options)
        if optimizer is not None and (
                options['optimizer_arrays'] is not None
                or not isinstance(optimizer, chainer.GradientMethod)):
            raise ValueError('give optimizer, a chainer.GradientMethod, or '
                             'optimizer_arrays, not '
                             f'{type(optimizer).__name__} and '
                             f'{options["optimizer_arrays"]!r}')
        return parse_bytes(memory)
    limit = _together(comm, check)
    agree(comm, {name: repr(value) for name, value in {
        **options, 'recompute': recompute, 'memory': limit,
        'optimizer': type(optimizer).__name__,
        'loss_func': getattr(loss_func, '__qualname__', type(loss_func)),
        }.items()},
        remedy=f'Pass the same to {function}() on all ranks.')
    return limit


def _check_given(plan: Any, comm: Any) -> None:
    """Raises ValueError if a plan was given, but not to the first rank."""
    first = comm.bcast(plan is not None)
    agree(comm, {}, '' if first or plan is None else
          'a plan is given on this rank, and none on rank 0, whose plan '
          'counts; pass plan= on rank 0, or on all ranks')


def _check_model(model: Any) -> None:
    if isinstance(model, PartitionedChain):
        raise ValueError('this model was cut already; build it anew')
    if hasattr(type(model), 'pieces'):
        raise ValueError('a Divisible is cut by its stage(comm); partition() '
                         'is for other Chains')
    if not isinstance(model, chainer.Link):
        what = (f'the class {model.__name__}' if isinstance(model, type)
                else type(model).__name__)
        raise TypeError(f'partition() takes a chainer.Link, not {what}')


def _check_options(recompute: Any, *, micro_batches: Any, schedule: Any,
                   optimizer_arrays: Any, chunks: Any) -> None:
    if recompute not in ('auto', True, False):
        raise ValueError("recompute must be 'auto', True or False, not "
                         f'{recompute!r}')
    if optimizer_arrays is not None and (
            not isinstance(optimizer_arrays, numbers.Integral)
            or optimizer_arrays < 0):
        raise ValueError('optimizer_arrays must be a number of at least 0, '
                         f'not {optimizer_arrays!r}')
    # Checks the others; the search checks the number of stages.
    make_schedule(_or(schedule, '1f1b'), 1, _or(micro_batches, 4),
                  _or(chunks, 1))


def _taken_by(optimizer: Any, arrays: int | None, names: Names, device: Any
              ) -> tuple[int, float]:
    """Arrays that an optimizer keeps, and those it takes for a while.

    Both are of a parameter's size; the latter while it updates that one.
    """
    if optimizer is None:
        kept = 2 if arrays is None else int(arrays)
        return kept, kept + 1.0
    return measured_arrays(optimizer, parameters_of(names), device)


def _recorded(model: Any, function: Callable, example: Any,
              grid: ProcessGrid
              ) -> tuple[Recorder, Program, Callable[[], Any]]:
    names = _together(grid.comm, lambda: Names(model))
    _share_generators(names, grid.comm, grid.pipeline)

    def record() -> tuple[Recorder, Program, Callable[[], Any]]:
        leaves, tree = nested.leaves(nested.arguments_of(example))

        def call() -> Any:
            # Forward may write to the arrays.
            args, kwargs = nested.rebuilt(tree, [
                leaf.copy() for leaf in leaves])
            return function(*args, **kwargs)
        recorder = Recorder(names, grid.pipeline)
        found = record_example(recorder, call, grid.comm.rank == 0)
        check_result(found.result)
        return recorder, found, call
    # The first rank takes times; the others wait, to leave it the cores.
    is_first = grid.comm.rank == 0
    first = _together(grid.comm, lambda: record() if is_first else None)
    others = _together(grid.comm, lambda: None if is_first else record())
    recorder, program, call = first or others
    raise_together(
        grid.comm, lambda: {**_shapes(names), **program.description()},
        ValueError, dict, 'Build the same model on all ranks, and give '
        'partition() examples of the same shapes; what a model calls must '
        'not depend on the rank.')
    return recorder, program, call


def _shapes(names: Names) -> dict[str, str]:
    """Shapes and dtypes of what the first rank sends."""
    arrays = {f'parameter {name}': parameter._data[0]
              for name, parameter in names.parameters.items()}
    for path, link in names.links.items():
        for name in sorted(link._persistent):
            arrays[f'{name!r} of link {path}'] = getattr(link, name)
    return {name: f'{array.dtype} {tuple(array.shape)}'
            for name, array in arrays.items() if hasattr(array, 'shape')}


def _plan(recorder: Recorder, program: Program, problem: CutProblem,
          given: Any, options: Mapping[str, Any], grid: ProcessGrid
          ) -> PartitionPlan:
    """The first rank's plan, or what was given to the first rank."""
    names = recorder.names

    def choose() -> PartitionPlan:
        if given is None:
            try:
                return search(Intervals(
                    program.calls, order_of(program.calls,
                                            list(names.parameters)),
                    parameters_of(names)), problem)
            except ValueError as error:
                raise type(error)('; '.join([
                    str(error), *recorder.undivided()])) from error
        plan = load_plan(given)
        _check_plan(plan, names, problem, options)
        if problem.memory is not None:
            _check_memory(plan, Intervals(
                program.calls, plan.order, parameters_of(names)), problem)
        return plan
    return of_first_rank(grid.comm, choose)


def _check_plan(plan: PartitionPlan, names: Names, problem: CutProblem,
                options: Mapping[str, Any]) -> None:
    if plan.stages != problem.stages:
        raise ValueError(f'the plan is for {plan.stages} stages, and there '
                         f'are {problem.stages}')
    for name, value in options.items():
        if value not in (None, getattr(plan, name)):
            raise ValueError(f'{name} is {value!r}, and the plan is for '
                             f'{getattr(plan, name)!r}; leave it out')
    if problem.recompute != 'auto' and any(
            again is not bool(problem.recompute) for again in plan.recompute):
        raise ValueError(f'recompute is {problem.recompute}, and the plan '
                         f'has {list(plan.recompute)}; leave it out')
    for group in plan.order:
        for name in group:
            if name not in names.parameters:
                raise ValueError(f'the plan knows a parameter {name}, which '
                                 'the model has not')


def _check_memory(plan: PartitionPlan, intervals: Intervals,
                  problem: CutProblem) -> None:
    assert problem.memory is not None
    _, memory = rank_bytes(intervals, dataclasses.replace(
        problem, micro_batches=plan.micro_batches, schedule=plan.schedule,
        chunks=plan.chunks), intervals.ends_of(plan.positions),
        plan.recompute)
    if max(memory) > problem.memory:
        raise DoesNotFit(
            f'the plan needs {size(max(memory), up=True)} on stage '
            f'{memory.index(max(memory))}, and {size(problem.memory)} are '
            'the limit; have partition() search a cut, without plan=')


def _distribute(names: Names, part: Partition, comm: Any) -> None:
    """Gives each rank its own parameters' values, and takes away the others'.

    Values are those of the first rank, which draws what is yet to be drawn;
    so are the persistent values of links.
    """
    # As in serial training: what gets its shape in forward is drawn last.  A
    # parameter that its link makes in forward has no values yet.
    order = comm.bcast([name for name in sorted(
        names.parameters, key=lambda name: names.shaped.index(name) + 1
        if name in names.shaped else 0)
        if names.parameters[name]._data[0] is not None])
    values = _values(names, part, comm, order)
    # What a rank does with a value is a part of what it agrees on next.
    while (host := _together(comm, lambda: next(values, None))) is not None:
        if comm.size > 1:
            comm.Bcast(host.reshape(-1).view(numpy.uint8))
    plain, arrays = broadcast_arrays(
        comm, *_together(comm, lambda: _persistent(names)))
    _together(comm, lambda: _set_persistent(names, plain, arrays))


def _values(names: Names, part: Partition, comm: Any, order: list[str]
            ) -> Iterator[numpy.ndarray]:
    """Gives memory for each value that is sent.

    When it goes on, the first rank's value has come.
    """
    for name in order:
        host = _to_send(comm, name, names.parameters[name])
        yield host
        _keep(name, names.parameters[name], host, name in part.own)


def _draw(name: str, parameter: chainer.Parameter) -> None:
    try:
        draw(parameter)
    except Exception as error:
        raise ValueError(f'the initial values of {name}: '
                         f'{type(error).__name__}: {error}') from error


def _to_send(comm: Any, name: str, parameter: chainer.Parameter
             ) -> numpy.ndarray:
    """The first rank's value; memory for it elsewhere."""
    if comm.rank == 0 and is_placeholder(parameter._data[0]):
        _draw(name, parameter)
    array = parameter._data[0]
    host = numpy.empty(array.shape, array.dtype)
    if comm.rank == 0:
        host[...] = chainer.backends.cuda.to_cpu(array)
    return host


def _keep(name: str, parameter: chainer.Parameter, host: numpy.ndarray,
          mine: bool) -> None:
    """Gives a parameter the value that has come, or a placeholder."""
    array = parameter._data[0]
    if not mine:
        take_away(name, parameter)
    else:
        settle(parameter, parameter._initial_device.send(host)
               if is_placeholder(array) else _like(host, array))


def _persistent(names: Names) -> tuple[list[Any], list[numpy.ndarray]]:
    """Persistent values of links, in order, and the arrays among them."""
    values = [getattr(link, name) for link in names.links.values()
              for name in sorted(link._persistent)]
    arrays = [chainer.backends.cuda.to_cpu(value) for value in values
              if isinstance(value, chainer.get_array_types())]
    return [value if isinstance(value, PLAIN) else NotImplemented
            for value in values], arrays


def _set_persistent(names: Names, plain: list[Any],
                    arrays: list[numpy.ndarray]) -> None:
    """Sets what :func:`_persistent` has found on the first rank."""
    given, coming = iter(plain), iter(arrays)
    for link in names.links.values():
        for name in sorted(link._persistent):
            value, now = next(given), getattr(link, name)
            if isinstance(now, chainer.get_array_types()):
                _like(next(coming), now)
            elif value is not NotImplemented:
                setattr(link, name, value)


def _share_generators(names: Names, comm: Any, pipeline: Any) -> None:
    """Sets links' generators to the states that they have on stage 0."""
    def read() -> tuple[list[Any], list[Any]]:
        found = generators_of(names.links)
        return found, list(map(state_of, found))
    own, states = _together(comm, read)
    states = pipeline.bcast(states)

    def write() -> None:
        if len(own) != len(states):
            raise ValueError(
                f'links keep {len(own)} generators of random numbers here, '
                f'and {len(states)} on the first stage; build the same model '
                'on all ranks')
        for generator, state in zip(own, states, strict=True):
            set_state(generator, state)
    _together(comm, write)


def _like(host: numpy.ndarray, array: Any) -> Any:
    array[...] = chainer.backend.get_array_module(array).asarray(host)
    return array
