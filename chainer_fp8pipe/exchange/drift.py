"""Replicas that are no longer the same to the last bit, found and named.

Every rank makes each update by itself, from the same mean.  A rank that makes
another one, or whose memory has lost a bit, goes on with other parameters, and
no exchange would notice.  So from time to time all ranks compare digests.
"""
from __future__ import annotations

import collections
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import chainer
import numpy
import xxhash

from ..mpi.agreement import are_equal, raised_by_all
from .gradients import distinct_parameters
from .lockstep import Lockstep

_REMEDY = (
    'Every rank must make the same updates: check learning rates, hooks, '
    "random numbers, optimizer states and the host's memory. "
    'check_every=0 in create_communicator ends the comparison')


class ReplicaDrift(RuntimeError):
    """Replicas differ in a parameter or in the state of its optimizer."""


def compare(model: chainer.Link, updates: int, ranks: Lockstep) -> None:
    """Compares the replicas, one on each rank; call it on all of them.

    Costs one all-reduce of 16 bytes while they are the same.

    Args:
        model: This rank's replica.
        updates: How many it has made.
        ranks: The ranks.

    Raises:
        ReplicaDrift: They differ, after so many updates; on all ranks.
    """
    mine = {name: _digests(parameter)
            for name, parameter in distinct_parameters(model)}
    if are_equal(ranks.comm, xxhash.xxh3_64_intdigest(
            repr(mine).encode()), ranks.wait):
        return
    everyone = ranks.allgather(mine)
    first, *others = (name for name in everyone[0] if any(
        digests[name] != everyone[0][name] for digests in everyone))
    text = (f'replicas have drifted apart, as seen after {updates} updates: '
            + _difference(first, [digests[first] for digests in everyone]))
    if others:
        text += (f'; {len(others)} more parameters differ: '
                 f'{", ".join(others[:3])}{", ..." * (len(others) > 3)}')
    raise raised_by_all(ReplicaDrift(f'{text}. {_REMEDY}.'))


def _digests(parameter: chainer.Parameter) -> dict[str, int]:
    """64 bits of each part of a parameter, by what the part is called.

    A parameter that is not initialised has no value, one without update rule
    no more than that, and a rule has no state before its first update.
    """
    parts = {'the value': parameter.array}
    rule = parameter.update_rule
    if rule is not None:
        parts['the count of updates'] = rule.t
        # What Chainer updates of a float16 parameter, and rounds to it.
        if rule._fp32_param is not None:
            parts['the float32 copy'] = rule._fp32_param.array
        parts |= {f"the optimizer's {name}": value
                  for name, value in sorted((rule.state or {}).items())}
    found = {}
    for name, value in parts.items():
        if isinstance(value, (numpy.ndarray, chainer.backends.cuda.ndarray)):
            found[name] = _digest(value)
        elif isinstance(value, (numbers.Number, str)):
            found[name] = xxhash.xxh3_64_intdigest(repr(value).encode())
        # Of other objects it is not known what makes them equal.
    return found


def _digest(array: Any) -> int:
    host = numpy.asarray(chainer.backends.cuda.to_cpu(array), order='C')
    digest = xxhash.xxh3_64(f'{host.dtype.str} {host.shape}'.encode())
    digest.update(host.reshape(-1).view(numpy.uint8).data)
    return digest.intdigest()


def _difference(name: str, everyone: Sequence[Mapping[str, int]]) -> str:
    """One sentence about a parameter, of all ranks' digests of its parts."""
    # All parts belong together: value and state are of one update.
    alike: dict[tuple, list[int]] = collections.defaultdict(list)
    for rank, digests in enumerate(everyone):
        alike[tuple(digests.items())].append(rank)
    most, *others = sorted(alike.values(),
                           key=lambda ranks: (-len(ranks), ranks))
    part = next(part for digests in everyone for part in digests if len(
        {digests.get(part) for digests in everyone}) > 1)
    text = f'{part} of parameter {name} is another on '
    if 2 * len(most) > len(everyone):
        return (f'{text}{_ranks(sorted(sum(others, [])))} than on most, '
                f'{_ranks(most)}')
    return (f'{text}each of {" | ".join(map(_ranks, [most, *others]))}, none '
            'of which is a majority')


def _ranks(ranks: Sequence[int]) -> str:
    *first, last = map(str, ranks)
    return (f'ranks {", ".join(first)} and {last}' if first
            else f'rank {last}')
