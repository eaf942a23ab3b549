"""The ranks of a job on a grid of two axes: stages and replicas."""
from __future__ import annotations

from typing import Any

from mpi4py import MPI

from .abort import enter_world
from .agreement import Signature, agree
from .placement import AXES, divisors, place
from .ranks import free_with_kept, nodes_of
from .watch import watch


class ProcessGrid:
    """Divides the ranks of a job into pipelines and replicas of each stage.

    Example::

        grid = ProcessGrid(comm, pipeline=2)
        model = Net().stage(grid)
        data = create_communicator('fp8', mpi_comm=grid.data)

    Make it on all ranks, with the same arguments.  ``print(grid)`` shows
    which rank is where, and which axis crosses between nodes.

    Args:
        comm: The ranks: a communicator of mpi4py's or of ChainerMN's.
        pipeline: Ranks of one pipeline, i.e. stages; it must divide the
            number of ranks.  1 is plain data parallelism.
        inside: The axis whose ranks share a node as far as nodes are large
            enough: ``'pipeline'`` or ``'data'``.  ``'auto'``: that with
            which fewer bytes go from node to node; if bytes are not given,
            the pipeline, unless it does not fit into the nodes and the data
            axis does.
        pipeline_bytes: What one pipeline moves in a step, activations and
            gradients over all its boundaries together;
            :func:`~chainer_fp8pipe.mpi.placement.axis_bytes` estimates
            both.
        data_bytes: The bytes of one replica's gradients, all stages
            together.
        ranks_per_node: Take every so many ranks for a node; by default,
            ranks that can share memory are a node.

    Attributes:
        comm: mpi4py's communicator of all ranks, as it was given.
        pipeline: That of this rank's pipeline; the rank in it is the stage.
        data: That of the replicas of this rank's stage; the rank in it is
            the replica.
        stage_index: This rank's stage.
        stages: How many there are.
        replica_index: This rank's replica of the model.
        replicas: How many there are.
        placement: Where all ranks are.

    Raises:
        ValueError: An argument is wrong, or not the same on all ranks; on
            all ranks.
        StartError: Of several processes each is alone, says MPI.
    """

    def __init__(self, comm: Any, pipeline: int, inside: str = 'auto',
                 pipeline_bytes: float | None = None,
                 data_bytes: float | None = None,
                 ranks_per_node: int | None = None) -> None:
        enter_world()
        self.comm: MPI.Comm = getattr(comm, 'mpi_comm', comm)
        arguments = {'pipeline': pipeline, 'inside': inside,
                     'pipeline_bytes': pipeline_bytes,
                     'data_bytes': data_bytes,
                     'ranks_per_node': ranks_per_node}
        # Compared before they are checked, so that all find the same fault.
        agree(self.comm, Signature({name: repr(value) for name, value
                                    in arguments.items()}),
              remedy='Make the ProcessGrid with the same arguments on all '
              'ranks.')
        _must_be_valid(self.comm.size, **arguments)
        nodes = ([rank // ranks_per_node for rank in range(self.comm.size)]
                 if ranks_per_node else nodes_of(self.comm))
        self.placement = place(nodes, pipeline, inside, pipeline_bytes,
                               data_bytes)
        self._moved = (
            None if pipeline_bytes is None or data_bytes is None
            else self.placement.moved(pipeline_bytes, data_bytes))
        self.stages, self.replicas = pipeline, self.comm.size // pipeline
        self.stage_index, self.replica_index = next(
            (stage, row.index(self.comm.rank))
            for stage, row in enumerate(self.placement.ranks)
            if self.comm.rank in row)
        watch(self.comm, self._role())
        self.pipeline: MPI.Comm = self.comm.Split(self.replica_index,
                                                  self.stage_index)
        self.data: MPI.Comm = self.comm.Split(self.stage_index,
                                              self.replica_index)

    def free(self) -> None:
        """Frees the communicators of both axes; call it on all ranks.

        MPI libraries have room for some 2,000 communicators.
        """
        free_with_kept(self.pipeline)
        free_with_kept(self.data)

    def __str__(self) -> str:
        nodes = len(set(self.placement.nodes))
        head = (f'{self.comm.size} ranks on {_count(nodes, "node")}: '
                f'{_count(self.stages, "stage")} x '
                f'{_count(self.replicas, "replica")} (rank@node)')
        return '\n'.join([head, *self.placement.table(), *self._axes()])

    def __repr__(self) -> str:
        return (f'<ProcessGrid: rank {self.comm.rank} is stage '
                f'{self.stage_index} of {self.stages}, replica '
                f'{self.replica_index} of {self.replicas}>')

    def _role(self) -> str:
        """This rank's part in a message about its death."""
        if self.stages == 1:
            return ''
        return f'stage {self.stage_index}' + (
            f' of replica {self.replica_index}' if self.replicas > 1 else '')

    def _axes(self) -> list[str]:
        """A line for each axis: bytes per step, and whether between nodes."""
        axes = {'pipeline': (self.stages, self.placement.pipeline_crossings),
                'data': (self.replicas, self.placement.data_crossings)}
        lines = []
        for axis, (length, crossings) in axes.items():
            line = f'{axis} axis: ' + (
                'nothing to send' if length == 1 else
                'crosses between nodes' if crossings else 'inside nodes')
            if self._moved and length > 1:
                total, crossing = self._moved[axis]
                line += f'; {_mega(total)} MB per step'
                if crossings:
                    line += f', {_mega(crossing)} MB of it between nodes'
            lines.append(line)
        return lines


def _must_be_valid(size: int, pipeline: Any, inside: Any,
                   pipeline_bytes: Any, data_bytes: Any,
                   ranks_per_node: Any) -> None:
    if pipeline not in divisors(size):
        raise ValueError(
            f'pipeline={pipeline!r} does not divide the {size} ranks; it can '
            f'be {", ".join(map(str, divisors(size)))}')
    if inside not in (*AXES, 'auto'):
        raise ValueError(f"inside must be 'pipeline', 'data' or 'auto', not "
                         f'{inside!r}')
    given = [value for value in (pipeline_bytes, data_bytes)
             if value is not None]
    if len(given) == 1 or not all(
            isinstance(value, (int, float)) and value >= 0
            for value in given):
        raise ValueError(
            'pipeline_bytes and data_bytes are two numbers of at least 0, or '
            f'both None; not {pipeline_bytes!r} and {data_bytes!r}')
    if ranks_per_node is not None and not (
            isinstance(ranks_per_node, int) and ranks_per_node >= 1):
        raise ValueError('ranks_per_node must be a number of at least 1, not '
                         f'{ranks_per_node!r}')


def _count(number: int, what: str) -> str:
    return f'{number} {what}' + 's' * (number != 1)


def _mega(count: float) -> str:
    return f'{count / 1e6:.3g}' if count < 1e9 else f'{count / 1e6:,.0f}'
