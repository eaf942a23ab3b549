"""What the ranks of a step tell each other, above all of failures."""
# In each of its three meetings every rank of a step says something small and
# hears what the others say.  Between them no rank waits for another one but
# through channels, groups of batch normalisation, or ``add``, which is a
# meeting itself.  So a rank that fails anywhere says so in place of whatever
# the others say next, and all raise.
from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy
from mpi4py import MPI

from ..mpi.agreement import Meeting, agree, digest
from ..mpi.world import shown, wait_until_read
from .channel import RemoteError

_SAME = ('All ranks must do the same: iterators of equal length, the same '
         'hooks of the optimizer, one snapshot to resume from.')


class NotTraced(ValueError):
    """A model cannot be divided for a batch; raised before any work."""


class Meetings:
    """The meetings of all ranks, ``comm``, or of one pipeline's alone.

    ``waits`` gives a block in which this rank waits for the others.
    """

    def __init__(self, comm: MPI.Comm, waits: Callable[[], Any]) -> None:
        self.comm, self._waits = comm, waits
        self.broken = ''        # what has failed after it had begun
        # The error that a block of `noting` has caught on this rank.
        self.error: BaseException | None = None
        self._meetings: dict[int, Meeting] = {}
        self._all_know = False      # of the error that is raised

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """A block that may fail, of which the others hear in :meth:`open`."""
        try:
            yield
        except BaseException as error:
            self.error = self.error or error

    def must_go_on(self) -> None:
        """Raises ValueError if something has failed after it had begun."""
        if self.broken:
            raise ValueError('these ranks failed before '
                             f'({self.broken}); make a new updater')

    def open(self, comm: MPI.Comm, entries: Mapping[str, str],
             value: Any = None) -> list[Any]:
        """The first meeting of a step; the values of all ranks.

        If something has failed on a rank, or entries differ, it raises
        ValueError on all of them; or the error itself, if it is no Exception.
        """
        error, self.error, self._all_know = self.error, None, False
        text = '' if error is None else (
            str(error) if str(error) and type(error) in (
                ValueError, NotTraced) else f'{type(error).__name__}: {error}')
        texts, digests, values, untraced = zip(*self._exchange(comm, (
            text, digest(entries), value, isinstance(error, NotTraced))),
            strict=True)
        if any(texts) or len(set(digests)) > 1:
            try:
                agree(comm, entries, text, _SAME,
                      NotTraced if any(untraced) else ValueError)
            except ValueError as together:
                if error is not None and not isinstance(error, Exception):
                    raise error from None       # a wish to exit
                raise together from error
        return list(values)

    def meet(self, comm: MPI.Comm, value: Any = None) -> list[Any]:
        """A later meeting: the values of all ranks, or RemoteError."""
        texts, values = zip(*self._exchange(comm, ('', value)), strict=True)
        if any(texts):
            self._break(comm, texts)
        return list(values)

    @contextlib.contextmanager
    def failing_together(self, comm: MPI.Comm, give_up: Callable[[str], object]
              ) -> Iterator[None]:
        """A block that may fail on this rank alone, up to its meeting.

        The others hear of it there, and raise :class:`RemoteError`.
        ``give_up`` is told what happened here, and makes ranks that wait for
        this one fail, too.
        """
        self._all_know = False
        try:
            yield
        except BaseException as error:      # the others wait for this rank
            if not self._all_know:
                give_up(str(error))
                is_own = not isinstance(error, RemoteError)
                if is_own:
                    show_traceback(comm)
                # What only repeats the others' words is not said again.
                everyone = self._exchange(comm, (
                    str(error) or type(error).__name__ if is_own else ' ',
                    None))
                with contextlib.suppress(RemoteError):
                    self._break(comm, [text for text, _ in everyone])
                if not is_own:
                    raise RemoteError(self.broken) from error
            raise

    def add(self, number: float) -> float:
        """Sums a number over all ranks, which is a :meth:`meet`."""
        return float(numpy.sum(self.meet(self.comm, number)))

    def _exchange(self, comm: MPI.Comm, what: tuple) -> list[Any]:
        if id(comm) not in self._meetings:
            self._meetings[id(comm)] = Meeting(comm)
        with self._waits():
            return self._meetings[id(comm)].say(what)

    def _break(self, comm: MPI.Comm, texts: Any) -> NoReturn:
        # Messages of the failed step may still be on their way, or some
        # ranks have been updated.
        self._all_know = True
        ranks = comm.Get_group().Translate_ranks(None, self.comm.Get_group())
        self.broken = '; '.join(
            f'rank {rank}: {text}' for rank, text
            in zip(ranks, texts, strict=True) if text.strip()
        ) or 'another rank failed'
        raise RemoteError(self.broken)


def show_traceback(comm: MPI.Comm) -> None:
    """Prints the exception that is handled, before the other ranks' errors."""
    if comm.size > 1:
        error: Any = sys.exc_info()[1]
        sys.stdout.flush()
        sys.stderr.write(f'\nrank {comm.rank} of {comm.size} failed:\n'
                         f'{shown(error)}')
        sys.stderr.flush()
        with contextlib.suppress(AttributeError):
            error.is_shown = True
        wait_until_read()
        # On its way from one node, what another prints may still overtake.
        time.sleep(0.2)
