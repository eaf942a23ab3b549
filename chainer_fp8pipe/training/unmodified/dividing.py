"""One rank reads each batch and divides it over the replicas.

Every rank of the job runs the script and makes an iterator; without a seed,
each shuffles in another order.  Only the first rank's is used, so that each
sample comes once in an epoch, in the order of a serial run.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import chainer
from mpi4py import MPI

from ..updater import FollowingIterator, progress


class DividingIterator(chainer.dataset.Iterator):
    """Reads batches, and gives each replica consecutive samples of them.

    Else it is the script's iterator.  ``comm`` has the replicas' ranks that
    read, of which this is the first.

    Attributes:
        whole: Samples of the last batch, of all replicas.
    """

    whole = 0

    def __init__(self, iterator: Any, comm: MPI.Comm) -> None:
        self._iterator, self._comm = iterator, comm

    def __next__(self) -> list:
        own: list = []
        packed = [b''] * self._comm.size
        problem: BaseException | None = None
        try:
            batch = self._iterator.next()
            self.whole = len(batch)
            ends = [self.whole * replica // self._comm.size
                    for replica in range(self._comm.size + 1)]
            own, *others = [batch[start:end] for start, end in pairwise(ends)]
            packed = [b'', *map(_packed, others)]
        except BaseException as error:  # the replicas wait for their parts
            problem = error
        now = progress(self._iterator)
        said = (None if problem is None else
                f'{type(problem).__name__}: {problem}')
        ended = isinstance(problem, StopIteration)
        self._comm.scatter([(part, self.whole, now, said, ended)
                            for part in packed])
        if problem is not None:
            raise problem
        return own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def reset(self) -> None:
        self._iterator.reset()

    def serialize(self, serializer: Any) -> None:
        self._iterator.serialize(serializer)

    def finalize(self) -> None:
        # Also called by __del__, maybe before __init__ was through.
        if '_iterator' in vars(self):
            self._iterator.finalize()


class ReceivingIterator(FollowingIterator):
    """Receives this replica's samples from the first replica's rank.

    Attributes:
        whole: Samples of the last batch, of all replicas.
    """

    whole = 0

    def __init__(self, comm: MPI.Comm) -> None:
        super().__init__()
        self._comm = comm

    def __next__(self) -> list:
        packed, self.whole, now, problem, ended = self._comm.scatter(None)
        self.follow(now)
        if ended:
            raise StopIteration
        if problem is not None:
            raise RuntimeError(
                f'the first replica could not read a batch ({problem})')
        return MPI.pickle.loads(packed)


def check_examples(examples: list) -> None:
    """Raises ValueError about examples that cannot go to other replicas."""
    _packed(examples)


def _packed(examples: list) -> bytes:
    try:
        return MPI.pickle.dumps(examples)
    except Exception:
        raise ValueError(
            'examples of the data set cannot be sent to the other replicas: '
            + obstacle(examples, 'examples', MPI.pickle.dumps) + '; have the '
            'data set return arrays, or start as many ranks as there are '
            'stages') from None


def obstacle(value: Any, name: str, copy: Callable[[Any], Any]) -> str:
    """Names the attribute or entry that cannot be copied; '' if all can.

    Args:
        value: The object.
        name: What messages call it.
        copy: Copies a value, or pickles it, or raises an exception.

    Returns:
        Such as ``"model.log (TextIOWrapper): cannot pickle ..."``.
    """
    return _obstacle(value, name, copy, set())


def _obstacle(value: Any, name: str, copy: Callable, seen: set[int]) -> str:
    if id(value) in seen:
        return ''
    seen.add(id(value))
    try:
        copy(value)
    except Exception as error:
        for path, part in _parts(value):
            if found := _obstacle(part, name + path, copy, seen):
                return found
        return f'{name} ({type(value).__name__}): {error}'
    return ''


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f'[{key!r}]', part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f'[{place}]', part) for place, part in enumerate(value))
    else:
        yield from ((f'.{key}', part) for key, part
                    in getattr(value, '__dict__', {}).items())
