"""Ranks that normalise batches together hear of each other's failures.

They wait for each other in the middle of a step.
"""
from __future__ import annotations

from typing import Any

import chainer
import numpy
from chainer.links import BatchNormalization
from chainermn.links import MultiNodeBatchNormalization

from ..mpi.grid import Group, split_groups


class HearingMean:
    """A communicator of ChainerMN's whose means hear of failures.

    ChainerMN's own would wait for ever for a rank that has failed.  The means
    are those of the same numbers, added up in float64.

    Attributes:
        original: ChainerMN's, which has all other methods.
        group: Its ranks.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self.group = Group(split_groups(original.mpi_comm))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def _multi_node_mean(self, sent: Any, mean: Any) -> None:
        own = chainer.backends.cuda.to_cpu(mean if sent is None else sent)
        found = self.group.gather(own.astype(numpy.float64)).mean(axis=0)
        mean[...] = chainer.backend.get_array_module(mean).asarray(
            found.astype(mean.dtype))


def hear_failures(model: chainer.Link) -> None:
    """Prepares a model for :func:`give_up`; call it on all ranks."""
    made: dict[int, HearingMean] = {}
    for link in model.links():
        if isinstance(link, MultiNodeBatchNormalization):
            comm = getattr(link.comm, 'original', link.comm)
            if comm.size > 1 and link._communication_backend == 'mpi':
                if id(comm) not in made:
                    made[id(comm)] = HearingMean(comm)
                link.comm = made[id(comm)]


def give_up(model: chainer.Link, text: str) -> None:
    """Tells ranks that normalise with this one that this one has failed.

    Those ranks wait in the middle of their own step.

    Args:
        model: Whose links may have a ``group`` of such ranks, or a
            communicator that :func:`hear_failures` has replaced.
        text: The failure.
    """
    for link in model.links():
        owner = link if isinstance(link, BatchNormalization) else vars(
            link).get('comm')
        group = getattr(owner, 'group', None)
        if isinstance(owner, (BatchNormalization, HearingMean)) and group:
            group.give_up(text)
