"""One rank reads each batch and divides it over the replicas.

Every rank of the job runs the script and makes an iterator; without a seed,
each shuffles in another order.  Only the first rank's is used, so that each
sample comes once in an epoch, in the order of a serial run.
"""
from __future__ import annotations

from itertools import pairwise
from typing import Any

import chainer
from mpi4py import MPI

from ..updater import FollowingIterator, progress


def divided(iterator: Any, comm: MPI.Comm) -> Any:
    """Gives each replica consecutive samples of the batches of the first one.

    Call it on the replicas' ranks that read, which are those of ``comm``; the
    iterators of others are not used.
    """
    return (_Receiving if comm.rank else _Dividing)(iterator, comm)


class _Dividing(chainer.dataset.Iterator):
    """The script's iterator, of which this rank keeps a part."""

    def __init__(self, iterator: Any, comm: MPI.Comm) -> None:
        self._iterator, self._comm = iterator, comm

    def __next__(self) -> list:
        parts: list = [[]] * self._comm.size
        packed = [b''] * self._comm.size
        problem: BaseException | None = None
        try:
            batch = self._iterator.next()
            parts = [batch[start:end] for start, end in pairwise(
                len(batch) * replica // self._comm.size
                for replica in range(self._comm.size + 1))]
            packed = [b'', *map(pack, parts[1:])]
        except BaseException as error:  # the replicas wait for their parts
            problem = error
        now = progress(self._iterator)
        said = (None if problem is None else
                f'{type(problem).__name__}: {problem}')
        ended = isinstance(problem, StopIteration)
        self._comm.scatter([(part, now, said, ended) for part in packed])
        if problem is not None:
            raise problem
        return parts[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def serialize(self, serializer: Any) -> None:
        self._iterator.serialize(serializer)

    def finalize(self) -> None:
        # Also called by __del__, maybe before __init__ was through.
        if '_iterator' in vars(self):
            self._iterator.finalize()


class _Receiving(FollowingIterator):
    def __init__(self, iterator: Any, comm: MPI.Comm) -> None:
        super().__init__(iterator)
        self._comm = comm

    def __next__(self) -> list:
        packed, now, problem, ended = self._comm.scatter(None)
        self.follow(now)
        if ended:
            raise StopIteration
        if problem is not None:
            raise RuntimeError(
                f'the first replica could not read a batch ({problem})')
        return MPI.pickle.loads(packed)


def pack(examples: list) -> bytes:
    """Pickles examples.

    Raises:
        ValueError: They cannot be pickled.
    """
    try:
        return MPI.pickle.dumps(examples)
    except Exception as error:
        raise ValueError(
            'examples of the data set cannot be sent to the other replicas '
            f'({error}); have the data set return arrays, or start one rank '
            'for each stage') from None
