"""Replicas that are no longer the same to the last bit, found and named.

Every rank makes each update by itself, from the same mean.  A rank that makes
another one, or whose memory has lost a bit, goes on with other parameters, and
no exchange would notice.  So from time to time all ranks compare digests.
"""
from __future__ import annotations

import numbers
from typing import Any

import chainer
import numpy
import xxhash

from ..mpi.agreement import are_equal, raised_by_all
from .gradients import distinct_parameters
from .ranks import Ranks

_REMEDY = (
    'Every rank must make the same updates: check learning rates, hooks, '
    "random numbers, optimizer states and the host's memory. "
    'check_every=0 in create_communicator ends the comparison')


class ReplicaDrift(RuntimeError):
    """Replicas differ in a parameter or in the state of its optimizer."""


def compare(model: chainer.Link, updates: int, ranks: Ranks) -> None:
    """Compares the replicas, one on each rank, after so many updates.

    Costs one all-reduce of 16 bytes while they are the same.

    Raises:
        ReplicaDrift: They differ; on all ranks.
    """
    mine = {name: digest(parameter)
            for name, parameter in distinct_parameters(model)}
    if are_equal(ranks.comm, xxhash.xxh3_64_intdigest(
            repr(mine).encode()), ranks.wait):
        return
    everyone = ranks.allgather(mine)
    first, *others = (name for name in everyone[0] if any(
        one[name] != everyone[0][name] for one in everyone))
    alike: dict[int, list[int]] = {}
    for rank, digests in enumerate(everyone):
        alike.setdefault(digests[first], []).append(rank)
    groups = ' | '.join(f'rank {", ".join(map(str, group))}' for group in
                        sorted(alike.values(), key=len, reverse=True))
    raise raised_by_all(ReplicaDrift(
        f'replicas have drifted apart, as seen after {updates} updates: '
        f'parameter {first}, or what its update rule keeps, is not the same '
        f'on {groups}'
        + f'; {len(others)} more parameters differ' * bool(others)
        + f'. {_REMEDY}.'))


def digest(parameter: chainer.Parameter) -> int:
    """64 bits of a parameter, and of what its update rule keeps of it."""
    parts: dict[str, Any] = {'value': parameter.array}
    if (rule := parameter.update_rule) is not None:
        # What Chainer updates of a float16 parameter, and rounds to it.
        copy = rule._fp32_param
        parts |= {'t': rule.t, 'copy': None if copy is None else copy.array,
                  **dict(sorted((rule.state or {}).items()))}
    found = xxhash.xxh3_64()
    for name, part in parts.items():
        if isinstance(part, (numpy.ndarray, chainer.backends.cuda.ndarray)):
            host = numpy.asarray(chainer.backends.cuda.to_cpu(part), order='C')
            found.update(f'{name} {host.dtype.str} {host.shape}'.encode())
            found.update(host.reshape(-1).view(numpy.uint8).data)
        # Of other objects it is not known what makes them equal.
        elif isinstance(part, (numbers.Number, str)):
            found.update(f'{name} {part!r}'.encode())
    return found.intdigest()
