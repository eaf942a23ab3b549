"""How the ranks of a pipeline open and close a step.

Every step opens with all ranks agreeing on what they are about to do and
closes with all ranks knowing whether it worked, so that whatever goes wrong on
one rank is an error on every rank.
"""
from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI

from ...channel.channel import RemoteError
from ...mpi.agreement import Signature, agree
from ...mpi.failure.abort import shown, wait_until_read
from ...mpi.grid import ProcessGrid
from ...mpi.waiting import wait_until
from ...pipeline.block import Arrays

_STEPS = ('train', 'evaluate', 'predict')
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


#: Two numbers by name: a weighted sum, and the sum of the weights.
Sums = dict[str, tuple[float, float]]


class Together:
    """Opens and closes steps on all ranks of a grid.

    A training step is one of all replicas, the other steps are of one
    pipeline.
    """

    def __init__(self, grid: ProcessGrid) -> None:
        self._grid = grid
        self._broken = ''
        #: Names that ranks have had sums for, in each kind of step.
        self._known: dict[str, list[str]] = {}

    def open(self, step: str, read: Callable[[], StepBatch],
             entries: Mapping[str, str] | None = None) -> Opened:
        """All ranks learn what the first stage has read, or that it failed.

        Args:
            step: ``'train'``, ``'evaluate'`` or ``'predict'``.
            read: Gives the batch; called on the first stage only.
            entries: What else must be the same on all ranks.

        Raises:
            StopIteration: ``read`` raised it; on all ranks.
            ValueError: It raised something else, ranks are about to do
                different things, or an earlier step failed; on all ranks.
        """
        batch, header, problem = None, numpy.zeros(8), ''
        header[0] = _STEPS.index(step)
        if self._broken:        # other replicas may not know
            header[1] = _FAILED
            problem = (f'this pipeline failed before ({self._broken}); make '
                       'a new updater')
        elif self._grid.stage_index == 0:
            try:
                batch = read()
                header[2] = batch.samples()
                header[4:] = batch.progress
            except StopIteration:
                header[1] = _ENDED
            except (Exception, SystemExit) as error:
                header[1] = _FAILED
                problem = f'{type(error).__name__}: {error}'
                show_traceback(self._grid.comm)
        if step == 'train' and self._grid.stage_index == 0:
            header[3] = self._samples_before(header[2])
        # Not a blocking broadcast: ranks may outnumber the cores, and MPI
        # does not yield them while the first stage reads data.
        wait_until(self._grid.pipeline.Ibcast(header).Test)
        said, outcome = _STEPS[int(header[0])], int(header[1])
        if said != step:
            problem = (f'this rank is about to {step}, but the first stage '
                       f'to {said}; call the same on all ranks')
        if problem and said != 'train' and self._grid.replicas > 1:
            # It will be called by its number in one pipeline.
            problem = f'(rank {self._grid.comm.rank} of all) {problem}'
        ended = ' although the data have ended' * (outcome == _ENDED)
        agree(self._scope(said),
              Signature({'the step': said + ended, **(entries or {})}),
              problem, _SAME)
        if outcome == _ENDED:
            raise StopIteration
        return Opened(batch, int(header[2]), int(header[3]),
                      tuple(header[4:].tolist()))

    def close(self, step: str, work: Callable[[], Sums],
              give_up: Callable[[str], None]) -> Sums:
        """Does the work; if it fails anywhere, raises everywhere.

        Args:
            step: As it was opened.
            work: Returns pairs of numbers to be summed over the ranks; a
                rank may have names that others have not.  May wait for other
                ranks only through channels.
            give_up: Told what happened where this rank failed or another
                one did; makes ranks that wait for this one fail too.

        Returns:
            The sums, by all names, the same on all ranks.

        Raises:
            RemoteError: Another rank failed.
            Exception: What failed on this rank.
        """
        scope = self._scope(step)
        error: BaseException | None = None
        mine: Sums = {}
        try:
            mine = work()
        except (Exception, SystemExit) as reason:
            error = reason
            give_up(str(reason))
            if not isinstance(reason, RemoteError):
                show_traceback(self._grid.comm)
        known = self._known.setdefault(step, [])
        outcome = numpy.array([error is not None,
                               not mine.keys() <= set(known)], numpy.int32)
        wait_until(scope.Iallreduce(MPI.IN_PLACE, outcome).Test)
        if outcome[0]:
            self._break(scope, error)
        if outcome[1]:      # once for a name
            learn_names(scope, known, mine)
        return summed(scope, known, mine)

    def _break(self, scope: MPI.Comm, error: BaseException | None) -> None:
        """Raises on all ranks what went wrong on some."""
        own = '' if error is None or isinstance(error, RemoteError) else str(
            error) or type(error).__name__
        # Messages of the failed step may still be on their way.
        self._broken = '; '.join(
            f'rank {rank}: {text}' for rank, text
            in scope.allgather((self._grid.comm.rank, own)) if text)
        if own:
            assert error is not None
            raise error
        raise RemoteError(self._broken)

    def _scope(self, step: str) -> MPI.Comm:
        return self._grid.comm if step == 'train' else self._grid.pipeline

    def _samples_before(self, samples: float) -> float:
        """How many samples the replicas before this one have."""
        if self._grid.replicas == 1:
            return 0
        return sum(self._grid.data.allgather(samples)[
            :self._grid.replica_index])


def learn_names(scope: MPI.Comm, known: list[str], mine: Sums) -> None:
    """Adds all ranks' names to those that all ranks know."""
    known[:] = dict.fromkeys(
        name for names in scope.allgather([*known, *mine]) for name in names)


def summed(scope: MPI.Comm, names: list[str], mine: Sums) -> Sums:
    """Sums over all ranks, of the names that one of them has."""
    numbers = numpy.array([(*mine.get(name, (0., 0.)), name in mine)
                           for name in names], numpy.float64)
    scope.Allreduce(MPI.IN_PLACE, numbers)
    return {name: (float(part), float(whole))
            for name, (part, whole, ranks) in zip(names, numbers,
                                                  strict=True) if ranks}


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
