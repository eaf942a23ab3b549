"""One rank reads each batch and divides it over the replicas."""
from __future__ import annotations

from typing import Any

from mpi4py import MPI

from ..updater import FollowingIterator, progress


class Divided(FollowingIterator):
    """Gives each replica consecutive samples of the batches of the first one.

    Without a seed each rank's iterator shuffles in another order.  Only the
    first rank's is used, so that each sample comes once in an epoch, in the
    order of one process.

    Args:
        iterator: The script's.
        comm: The replicas' ranks that read.
    """

    def __init__(self, iterator: Any, comm: MPI.Comm) -> None:
        super().__init__(iterator)
        self._own: Any = None if comm.rank else iterator
        self._comm = comm

    def __next__(self) -> list:
        problem, said, size = None, None, self._comm.size
        if self._own is not None:
            try:
                batch = self._own.next()
                parts: list[Any] = [MPI.pickle.dumps(
                    batch[len(batch) * n // size:len(batch) * (n + 1) // size])
                    for n in range(size)]
            except BaseException as error:  # the replicas wait
                problem = error
                parts = size * [
                    StopIteration() if isinstance(error, StopIteration) else
                    RuntimeError('the first replica could not read a batch '
                                 f'({type(error).__name__}: {error})')]
            said = [(part, progress(self._own)) for part in parts]
        part, now = self._comm.scatter(said)
        self.follow(now)
        if isinstance(part, BaseException):
            raise problem or part
        return MPI.pickle.loads(part)

    def serialize(self, serializer: Any) -> None:
        if self._own is not None:
            self._own.serialize(serializer)
            self.follow(progress(self._own))

    def finalize(self) -> None:
        # Also called by __del__, maybe before __init__ was through.
        if vars(self).get('_own') is not None:
            self._own.finalize()
