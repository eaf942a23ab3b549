"""A plan as what it sets up: communicator, grid, partition."""
from __future__ import annotations

from typing import Any

from mpi4py import MPI

from ..chains.names import Names
from ..chains.partition import partition
from ..communicators import create_communicator
from ..communicators.options import make_options
from ..links.divisible import Divisible
from ..mpi import all_ranks
from ..mpi.agreement import agree, raise_together
from ..mpi.grid import ProcessGrid
from ..mpi.ranks import once
from ..planning.job_plan import Configuration, JobPlan, load_job_plan
from .layered import layer_counts

_REMEDY = ('correct it, or make the plan again: '
           'python -m chainer_fp8pipe plan -o FILE SCRIPT')


class PlannedJob:
    """A plan, and what it sets up: communicator, grid, partition.

    Args:
        plan: A :class:`~chainer_fp8pipe.planning.job_plan.JobPlan`, the
            path of a file that one was saved in, or its content.
        example: For :meth:`partition`; None: given there.

    Raises:
        ValueError: There is no such file, or it is no plan that can be
            carried out; the message names file, field and remedy.

    Attributes:
        plan: The plan.
    """

    def __init__(self, plan: Any, example: Any = None) -> None:
        self.plan: JobPlan = load_job_plan(
            plan, remedy=_REMEDY, check=lambda plan: _check_options(
                plan.choice))
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
        agree(comm, {}, self.plan.problem(
            planned if model is None else shapes_of(model), comm.size))

    def grid(self, comm: Any = None) -> ProcessGrid:
        """The grid of stages and replicas; call it on all ranks.

        Args:
            comm: All ranks; None: ``MPI.COMM_WORLD``.
        """
        comm = mpi_of(comm)
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
        choice, comm = self.plan.choice, mpi_of(comm)
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
        choice, comm = self.plan.choice, mpi_of(comm)
        self.check(comm, model)
        cut = choice.cut
        if cut is None:
            return model
        if isinstance(model, Divisible):
            part = model.stage(self.grid(comm), raise_together(
                comm, lambda: layer_counts(cut, len(model)),
                error=ValueError), cut.chunks)
            part.plan = cut         # for PipelineUpdater
            return part
        if example is None:
            if self._example is None:
                raise ValueError('a plan from a file has no example; pass '
                                 'partition(model, example)')
            example = self._example.of(max(1, round(
                self.plan.batch / choice.replicas / choice.micro_batches)))
        return partition(model, example, self.grid(comm), **{
            'micro_batches': choice.micro_batches,
            'schedule': choice.schedule, 'plan': cut,
            'chunks': cut.chunks, **options})


def shapes_of(model: Any) -> dict[str, Any]:
    """Of all parameters, by path; None: unknown yet."""
    return {name: None if one._data[0] is None else tuple(one._data[0].shape)
            for name, one in Names(model).parameters.items()}


def _check_options(choice: Configuration) -> None:
    """Raises ValueError if a communicator cannot be made."""
    for name in 'algorithm', 'overlap':
        if name in choice.options:
            raise ValueError(f'choice.options has {name!r}, which is '
                             f'choice.{name}')
    try:
        if choice.codec != 'naive':
            make_options(choice.codec, choice.communicator_options())
        elif choice.options or choice.overlap:
            raise ValueError("ChainerMN's naive has none")
    except ValueError as error:
        raise ValueError('choice.algorithm, overlap and options: '
                         f'{error}') from None
    rows, columns = choice.options.get('shape', (0, 0))
    if (rows, columns) != (0, 0) and rows * columns != choice.replicas:
        raise ValueError(f'choice.options.shape is {rows} x {columns}, but '
                         f'there are {choice.replicas} replicas')


def mpi_of(comm: Any) -> MPI.Comm:
    """mpi4py's communicator; None: of all ranks."""
    return MPI.COMM_WORLD if comm is None else all_ranks(comm)
