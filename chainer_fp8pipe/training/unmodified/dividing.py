"""One rank reads each batch and divides it over the replicas.

Every rank of the job runs the script and makes an iterator; without a seed,
each shuffles in another order.  Only the first rank's is used, so that each
sample comes once in an epoch, in the order of a serial run.
"""
from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import chainer
from mpi4py import MPI

from ..updater import FollowingIterator, progress


def divided(iterator: Any, comm: MPI.Comm) -> Any:
    """Gives each replica consecutive samples of the batches of the first one.

    Call it on the replicas' ranks that read, which are those of ``comm``; the
    iterators of others are not used.  The attribute ``whole`` of what it
    returns says how many samples of the last batch all replicas have had.
    """
    return (_Receiving if comm.rank else _Dividing)(iterator, comm)


class _Dividing(chainer.dataset.Iterator):
    """The script's iterator, of which this rank keeps a part."""

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


class _Receiving(FollowingIterator):
    whole = 0

    def __init__(self, iterator: Any, comm: MPI.Comm) -> None:
        super().__init__(iterator)
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
            'data set return arrays, or start one rank for each stage'
            ) from None


def obstacle(value: Any, name: str, copy: Callable[[Any], Any],
             seen: frozenset[int] = frozenset()) -> str:
    """Names the attribute or entry that cannot be copied; '' if all can.

    Args:
        value: The object.
        name: What messages call it.
        copy: Copies a value, or pickles it, or raises an exception.
        seen: Identities of what it is in, which it may have in it again.

    Returns:
        Such as ``"model.log (TextIOWrapper): cannot pickle ..."``.
    """
    try:
        copy(value)
    except Exception as error:
        parts: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            parts = [(f'[{key!r}]', part) for key, part in value.items()]
        elif isinstance(value, (list, tuple)):
            parts = [(f'[{at}]', part) for at, part in enumerate(value)]
        else:
            parts = [(f'.{key}', part) for key, part
                     in getattr(value, '__dict__', {}).items()]
        inside = seen | {id(value)}
        return next(filter(None, (
            obstacle(part, name + path, copy, inside)
            for path, part in parts if id(part) not in inside)),
            f'{name} ({type(value).__name__}): {error}')
    return ''
