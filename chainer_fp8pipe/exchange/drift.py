"""Replicas that are no longer the same to the last bit, found and mended.

Every rank makes each update by itself, from the same mean.  A rank that makes
another one, or whose memory has lost a bit, goes on with other parameters, and
no exchange would notice.  So from time to time all ranks compare digests.
"""
from __future__ import annotations

import collections
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import chainer
import numpy
import xxhash
from mpi4py import MPI

from ..mpi.agreement import are_equal
from ..mpi.waiting import wait_until
from .gradients import distinct_parameters
from .replica_values import contents_of, digest, on_host, replace

_REMEDY = (
    'Every rank must make the same updates: look for what depends on the rank '
    'or on chance in learning rates, hooks and optimizers, for optimizer '
    "states that were loaded on some ranks only, and at the host's memory. "
    "drift='repair' in create_communicator lets most ranks' values replace "
    'the others, check_every=0 ends the comparison')

#: Digests of a parameter's parts, by what the parts are called.
Digests = dict[str, int]


class ReplicaDrift(RuntimeError):
    """Replicas differ in a parameter or in the state of its optimizer."""


class Difference(NamedTuple):
    """A parameter that is not the same on all ranks.

    Attributes:
        name: Of the parameter.
        part: What differs: the first part of several.
        groups: Ranks with the same bits, the largest group first, of groups
            that are equally large that with the lowest rank.
    """

    name: str
    part: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def has_majority(self) -> bool:
        """Whether more than half of the ranks have the same bits."""
        first, *others = map(len, self.groups)
        return first > sum(others)

    def in_words(self) -> str:
        """One sentence, without its end."""
        if self.has_majority:
            others = sorted(rank for group in self.groups[1:]
                            for rank in group)
            return (f'{self.part} of parameter {self.name} is another on '
                    f'{_ranks(others)} than on most, {_ranks(self.groups[0])}')
        return (f'{self.part} of parameter {self.name} is another on each of '
                f'{" | ".join(map(_ranks, self.groups))}, none of which is '
                'a majority')


class ReplicaCheck:
    """Compares the replicas of a model from time to time.

    Args:
        comm: The ranks, one replica each.
        every: Updates from one comparison to the next; 0: there is none.
        repairs: Most ranks' values replace the others; else a difference is
            an error.
    """

    def __init__(self, comm: MPI.Comm, every: int, repairs: bool) -> None:
        self._comm = comm
        self._every = every
        self._repairs = repairs

    def is_due(self, updates: int) -> bool:
        """Whether to compare after so many updates, the same on all ranks."""
        return bool(self._every and updates and self._comm.size > 1
                    and updates % self._every == 0)

    def differences(self, model: chainer.Link) -> list[Difference]:
        """Parameters in which the replicas differ; call it on all ranks.

        Costs one all-reduce of 16 bytes while there are none.
        """
        mine = {name: {part: digest(value) for part, value
                       in contents_of(parameter).items()}
                for name, parameter in distinct_parameters(model)}
        if are_equal(self._comm, xxhash.xxh3_64_intdigest(
                repr(list(mine.items())).encode())):
            return []
        return _differences(self._comm.allgather(mine))

    def mend(self, model: chainer.Link, updates: int,
             found: Sequence[Difference]) -> None:
        """Repairs differences, or raises an error; call it on all ranks.

        Args:
            model: The model.
            updates: How many were made of it.
            found: By :meth:`differences`.

        Raises:
            ReplicaDrift: If differences are not repaired; on all ranks.
        """
        text = (f'replicas have drifted apart, as seen after {updates} '
                f'updates: {found[0].in_words()}')
        if found[1:]:
            text += (f'; {len(found) - 1} more parameters differ: '
                     f'{_names(found[1:])}')
        if not self._repairs:
            raise ReplicaDrift(f'{text}. {_REMEDY}.')
        parameters = dict(distinct_parameters(model))
        for difference in found:
            _adopt(self._comm, parameters[difference.name],
                   difference.groups[0][0])
        if self._comm.rank == 0:
            warnings.warn(
                f'{text}. They were replaced by those of '
                f'{_ranks(found[0].groups[0])}'
                + ' or of each parameter\'s own majority' * bool(found[1:]),
                RuntimeWarning, stacklevel=2)


def _differences(everyone: Sequence[Mapping[str, Digests]]
                 ) -> list[Difference]:
    """Of all ranks' digests by parameter, those that differ."""
    found = []
    for name in everyone[0]:
        # All parts belong together: value and state are of one update.
        ranks: dict[tuple, list[int]] = collections.defaultdict(list)
        for rank, digests in enumerate(everyone):
            ranks[tuple(digests[name].items())].append(rank)
        if len(ranks) > 1:
            parts = dict.fromkeys(
                part for digests in everyone for part in digests[name])
            part = next((part for part in parts if len(
                {digests[name].get(part) for digests in everyone}) > 1),
                'the order of the state')
            found.append(Difference(name, part, tuple(sorted(
                map(tuple, ranks.values()),
                key=lambda group: (-len(group), group)))))
    return found


def _adopt(comm: MPI.Comm, parameter: chainer.Parameter, root: int) -> None:
    """Gives a parameter the contents that it has on one rank."""
    contents: dict[str, Any] = {}
    if comm.rank == root:
        contents = {part: on_host(value) if hasattr(value, 'dtype') else value
                    for part, value in contents_of(parameter).items()}
    # Of arrays dtype and shape, of others all.
    outline = comm.bcast({
        part: (value.dtype.str, value.shape)
        if isinstance(value, numpy.ndarray) else value
        for part, value in contents.items()}, root)
    for part, value in outline.items():
        if isinstance(value, tuple):
            if comm.rank != root:
                contents[part] = numpy.empty(value[1], value[0])
            bytes_of = contents[part].reshape(-1).view(numpy.uint8)
            # MPI's own wait would keep the core from other ranks.
            wait_until(comm.Ibcast([bytes_of, MPI.BYTE], root).Test)
        else:
            contents[part] = value
    if comm.rank != root:
        replace(parameter, contents)


def _names(found: Sequence[Difference], most: int = 3) -> str:
    names = [difference.name for difference in found[:most]]
    return ', '.join(names) + ', ...' * (len(found) > most)


def _ranks(ranks: Sequence[int]) -> str:
    *first, last = map(str, ranks)
    return (f'ranks {", ".join(first)} and {last}' if first
            else f'rank {last}')
