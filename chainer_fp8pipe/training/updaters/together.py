"""How the ranks of a pipeline open, close and finish a step.

Whatever goes wrong on one rank is an error on every rank.  A step opens with
all ranks agreeing on what they are about to do, closes with all of them
knowing whether it worked, and is finished by what follows: the exchange, the
optimizer with its hooks, and reports.  Between these three no rank waits for
another one but through channels, groups of batch normalisation, or
:meth:`Together.add`, which hear of a failure.
"""
from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy
from mpi4py import MPI

from ...channel.channel import RemoteError
from ...mpi.agreement import Signature, agree
from ...mpi.failure.abort import shown, wait_until_read
from ...mpi.grid import ProcessGrid
from ...mpi.waiting import wait_until
from ...pipeline.block import Arrays
from .reported import Reported, share_means

_STEPS = ('train', 'update', 'evaluate', 'predict')
_READ, _ENDED, _FAILED = range(3)
_SAME = ('All ranks must do the same: iterators of equal length, the same '
         'hooks of the optimizer, one snapshot to resume from.')


class StepBatch(NamedTuple):
    """What the first stage of a pipeline reads for one step."""

    inputs: Arrays
    target: Any         # for the loss; None where there is none
    #: Numbers about the iterator, for the other stages.
    progress: tuple[float, ...] = (0.0,) * 4
    #: Names of the inputs, where they are keyword arguments.
    keys: tuple[str, ...] | None = None

    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments that ``StandardUpdater`` would call a model with."""
        if self.keys is None:
            return self.inputs, {}
        return (), dict(zip(self.keys, self.inputs, strict=True))

    def samples(self) -> int:
        """How many samples there are; raises if that is not clear."""
        arrays = self.inputs if self.target is None else (
            *self.inputs, self.target)
        for array in arrays:
            if not hasattr(array, 'shape'):
                raise TypeError(
                    f'a batch holds a {type(array).__name__}, not an array; '
                    'have the converter make arrays of inputs and target')
        lengths = sorted({len(array) for array in arrays})
        if len(lengths) != 1:
            raise ValueError(f'the arrays of a batch have {lengths} samples; '
                             'they must have equally many')
        if not lengths[0]:
            raise ValueError('a batch without samples')
        return lengths[0]


class Opened(NamedTuple):
    """What all ranks know of a step's batch."""

    batch: StepBatch | None         # None but on the first stage
    samples: int                    # in this replica's batch
    first_sample: int               # index in the batch of all replicas
    progress: tuple[float, ...]     # of the first stage's iterator


class Together:
    """Opens, closes and finishes steps on all ranks of a grid.

    A training step is one of all replicas, evaluation and prediction are of
    one pipeline.
    """

    def __init__(self, grid: ProcessGrid) -> None:
        self._grid = grid
        self._broken = ''
        self._told = False      # all ranks know of a failure in finish()
        #: Names that ranks have reported, in each kind of step.
        self._known: dict[str, list[str]] = {}

    def open(self, step: str, read: Callable[[], StepBatch],
             entries: Callable[[], Mapping[str, str]] = dict) -> Opened:
        """All ranks learn what the first stage has read, or that it failed.

        Args:
            step: ``'train'``, ``'evaluate'`` or ``'predict'``; ``'update'``
                is that of replicas which number no samples.
            read: Gives the batch; called on the first stage only.
            entries: Gives what else must be the same on all ranks; what it
                raises is an error on all of them.

        Raises:
            StopIteration: ``read`` raised it; on all ranks.
            ValueError: It raised something else, ranks are about to do
                different things, or an earlier step failed; on all ranks.
            BaseException: Where ``read`` or ``entries`` raised what is no
                Exception.
        """
        header = numpy.zeros(8)
        header[0] = _STEPS.index(step)
        mine: dict[str, str] = {}
        batch, error = self._begin(read, entries, header, mine)
        problem = '' if error is None else (
            str(error) if type(error) is ValueError
            else f'{type(error).__name__}: {error}')
        if step == 'train' and self._grid.stage_index == 0:
            header[3] = self._samples_before(header[2])
        # Not a blocking broadcast: ranks may outnumber the cores, and MPI
        # does not yield them while the first stage reads data.
        wait_until(self._grid.pipeline.Ibcast(header).Test)
        said, outcome = _STEPS[int(header[0])], int(header[1])
        if said != step:
            problem = (f'this rank is about to {step}, but the first stage '
                       f'to {said}; call the same on all ranks')
        if problem and self._grid.replicas > 1 and (
                self._scope(said) is not self._grid.comm):
            # It will be called by its number in one pipeline.
            problem = f'(rank {self._grid.comm.rank} of all) {problem}'
        ended = ' although the data have ended' * (outcome == _ENDED)
        try:
            agree(self._scope(said),
                  Signature({'the step': said + ended, **mine}),
                  problem, _SAME)
        except ValueError:
            if error is not None and not isinstance(error, Exception):
                raise error from None       # a wish to exit
            raise
        if outcome == _ENDED:
            raise StopIteration
        return Opened(batch, int(header[2]), int(header[3]),
                      tuple(header[4:].tolist()))

    def close(self, step: str, work: Callable[[], Reported],
              give_up: Callable[[str], None]) -> dict[str, Any]:
        """Does the work; if it fails anywhere, raises everywhere.

        Args:
            step: As it was opened.
            work: Returns what this rank reports.  May wait for other ranks
                only through channels.
            give_up: Told what happened where this rank failed or another
                one did; makes ranks that wait for this one fail too.

        Returns:
            Means of what was reported, the same on all ranks.

        Raises:
            RemoteError: Another rank failed.
            BaseException: What failed on this rank.
        """
        scope = self._scope(step)
        error: BaseException | None = None
        mine = Reported()
        try:
            mine = work()
        except BaseException as reason:     # the others wait for this rank
            error = reason
            give_up(str(reason))
            if not isinstance(reason, RemoteError):
                show_traceback(self._grid.comm)
        means = share_means(scope, self._known.setdefault(step, []), mine,
                            error is not None)
        if means is None:
            self._break(scope, error)
        return means

    def finish(self, step: str, action: Callable[[], Any]) -> Any:
        """Does what follows a step; if it fails anywhere, raises everywhere.

        Args:
            step: As it was closed.
            action: May wait for other ranks through :meth:`add`.

        Returns:
            What the action returned.

        Raises:
            RemoteError: It failed on another rank.
            BaseException: What failed on this rank.
        """
        error: BaseException | None = None
        result = None
        self._told = False
        try:
            result = action()
        except BaseException as reason:     # the others wait for this rank
            error = reason
            if not isinstance(reason, RemoteError):
                show_traceback(self._grid.comm)
        if not self._told:
            self._sum(self._scope(step), error is not None)
        if self._told:
            self._break(self._scope(step), error)
        return result

    def add(self, number: float = 0.0) -> float:
        """Sums a number over the stages, the same sum on all ranks.

        For hooks that look at the whole model; all ranks call it.  After an
        exchange the replicas have the same numbers: the first one's count.

        Raises:
            RemoteError: What follows the step has failed on another rank.
        """
        total = self._sum(self._grid.comm, False,
                          0.0 if self._grid.replica_index else number)
        if self._told:
            raise RemoteError('another rank failed')
        return total

    def _begin(self, read: Callable[[], StepBatch],
               entries: Callable[[], Mapping[str, str]],
               header: numpy.ndarray, mine: dict[str, str]
               ) -> tuple[StepBatch | None, BaseException | None]:
        """This rank's part of :meth:`open`: the batch, and what is wrong."""
        reading = False
        try:
            mine.update(entries())
            if self._broken:        # other replicas may not know
                raise ValueError(f'this pipeline failed before ({self._broken}'
                                 '); make a new updater')
            if self._grid.stage_index:
                return None, None
            reading = True
            batch = read()
            header[2] = batch.samples()
            header[4:] = batch.progress
            return batch, None
        except StopIteration:
            header[1] = _ENDED
            return None, None
        except BaseException as error:      # the others wait for this rank
            header[1] = _FAILED
            if reading:
                show_traceback(self._grid.comm)
            return None, error

    def _sum(self, scope: MPI.Comm, failed: bool, number: float = 0.0
             ) -> float:
        """All of what follows a step is such sums.

        So a rank that has failed can take the place of whatever the others
        do next, and tell them.
        """
        # The type is given: no parameters have the norm 0, an integer.
        numbers = numpy.array([failed, number], numpy.float64)
        # MPI's own wait would keep the core from other ranks.
        wait_until(scope.Iallreduce(MPI.IN_PLACE, numbers).Test)
        self._told = numbers[0] > 0
        return float(numbers[1])

    def _break(self, scope: MPI.Comm, error: BaseException | None
               ) -> NoReturn:
        """Raises on all ranks what went wrong on some."""
        own = '' if error is None or isinstance(error, RemoteError) else str(
            error) or type(error).__name__
        # Messages of the failed step may still be on their way, or some
        # stages have been updated.
        self._broken = '; '.join(
            f'rank {rank}: {text}' for rank, text
            in scope.allgather((self._grid.comm.rank, own)) if text)
        if own:
            assert error is not None
            raise error
        raise RemoteError(self._broken)

    def _scope(self, step: str) -> MPI.Comm:
        return (self._grid.comm if step in ('train', 'update')
                else self._grid.pipeline)

    def _samples_before(self, samples: float) -> float:
        """How many samples the replicas before this one have."""
        if self._grid.replicas == 1:
            return 0
        return sum(self._grid.data.allgather(samples)[
            :self._grid.replica_index])


def show_traceback(comm: MPI.Comm) -> None:
    """Prints the exception that is handled, before what it leads to.

    The other ranks fail as soon as they hear of it.
    """
    if comm.size > 1:
        error = sys.exc_info()[1]
        assert error is not None
        sys.stdout.flush()
        sys.stderr.write(f'\nrank {comm.rank} of {comm.size} failed:\n'
                         f'{shown(error)}')
        sys.stderr.flush()
        with contextlib.suppress(AttributeError):
            error.is_shown = True       # type: ignore[attr-defined]
        wait_until_read()
        # On its way from one node, what another prints may still overtake.
        time.sleep(0.2)
