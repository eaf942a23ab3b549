"""Replicas that are no longer the same to the last bit, found and named.

Every rank makes each update by itself, from the same mean.  A rank that makes
another one, or whose memory has lost a bit, goes on with other parameters, and
no exchange would notice.  So from time to time all ranks compare digests.
"""
from __future__ import annotations

import collections
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import chainer
import numpy
import xxhash

from ..mpi.agreement import are_equal, raised_by_all
from .gradients import distinct_parameters
from .lockstep import Lockstep

_VALUE = 'the value'
_COPY = 'the float32 copy'
_COUNT = 'the count of updates'
_STATE = 'the optimizer\'s '        # and then the name in the state
_REMEDY = (
    'Every rank must make the same updates: look for what depends on the rank '
    'or on chance in learning rates, hooks and optimizers, for optimizer '
    "states that were loaded on some ranks only, and at the host's memory. "
    'check_every=0 in create_communicator ends the comparison')

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


def compare(model: chainer.Link, updates: int, lockstep: Lockstep) -> None:
    """Compares the replicas; call it on all ranks.

    Costs one all-reduce of 16 bytes while they are the same.

    Args:
        model: The model.
        updates: How many were made of it.
        lockstep: The ranks, one replica each.

    Raises:
        ReplicaDrift: They differ; on all ranks.
    """
    mine = {name: {part: digest(value) for part, value
                   in contents_of(parameter).items()}
            for name, parameter in distinct_parameters(model)}
    if are_equal(lockstep.comm, xxhash.xxh3_64_intdigest(
            repr(list(mine.items())).encode()), lockstep.wait):
        return
    first, *others = _differences(lockstep.allgather(mine))
    text = (f'replicas have drifted apart, as seen after {updates} '
            f'updates: {first.in_words()}')
    if others:
        text += (f'; {len(others)} more parameters differ: '
                 f'{_names(others)}')
    raise raised_by_all(ReplicaDrift(f'{text}. {_REMEDY}.'))


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


def _names(found: Sequence[Difference], most: int = 3) -> str:
    names = [difference.name for difference in found[:most]]
    return ', '.join(names) + ', ...' * (len(found) > most)


def _ranks(ranks: Sequence[int]) -> str:
    *first, last = map(str, ranks)
    return (f'ranks {", ".join(first)} and {last}' if first
            else f'rank {last}')


# --- what is compared ---

def contents_of(parameter: chainer.Parameter) -> dict[str, Any]:
    """All parts by what they are called: arrays and plain values.

    A parameter that is not initialised has no value, one without update rule
    no more than that, and a rule has no state before its first update.
    """
    found: dict[str, Any] = {}
    if parameter.array is not None:
        found[_VALUE] = parameter.array
    rule = parameter.update_rule
    if rule is None:
        return found
    found[_COUNT] = rule.t
    # Of a float16 parameter, whose value is made from this one.
    if rule._fp32_param is not None and rule._fp32_param.array is not None:
        found[_COPY] = rule._fp32_param.array
    for name, value in (rule.state or {}).items():
        # Of other objects it is not known what makes them equal.
        if _is_array(value) or isinstance(value, (numbers.Number, str)):
            found[_STATE + name] = value
    return found


def digest(value: Any) -> int:
    """64 bits of a part: of its bytes, its dtype and its shape.

    NaN is as good as any other number, and 0 is not -0.

    Args:
        value: An array of NumPy's or CuPy's, or a plain value.
    """
    if not _is_array(value):
        return xxhash.xxh3_64_intdigest(repr(value).encode())
    host = _on_host(value)
    found = xxhash.xxh3_64(f'{host.dtype.str} {host.shape}'.encode())
    found.update(host.reshape(-1).view(numpy.uint8).data)
    return found.intdigest()


def _on_host(array: Any) -> numpy.ndarray:
    """The array, or a copy, in the host's memory and in C's order."""
    return numpy.asarray(chainer.backends.cuda.to_cpu(array), order='C')


def _is_array(value: Any) -> bool:
    return isinstance(value, (numpy.ndarray, chainer.backends.cuda.ndarray))
