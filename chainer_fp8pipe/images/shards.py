"""The samples of each batch on each rank: a pure function of the position.

An epoch is one order of all samples, from the seed and the epoch's number.
It is cut into global batches, and each of these into one part per rank, by
the position in the epoch alone, not by earlier batches or other ranks.  So
every rank makes the same number of batches, and a run goes on at any sample,
even with other ranks or another batch size.

No sample is left out or repeated to fill a last batch.  The batches of an
epoch are instead of nearly equal size: ``rest`` samples take the n batches
that they need, and the sizes of these differ by one at most, on a rank too.
There is no small last batch.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy


class EpochPosition(NamedTuple):
    """How far all ranks together are.

    Attributes:
        epoch: Finished epochs.
        used: Samples of the present epoch that were used, over all ranks.
    """

    epoch: int = 0
    used: int = 0


class GlobalBatch(NamedTuple):
    """The batch of all ranks together.

    Attributes:
        epoch: The epoch of its samples.
        start: Index of its first sample in the order of that epoch.
        stop: Index after its last sample.
        after: The position behind it.
    """

    epoch: int
    start: int
    stop: int
    after: EpochPosition


def epoch_order(samples: int, seed: int, epoch: int,
                shuffle: bool = True) -> numpy.ndarray:
    """The order of all samples in one epoch: int64, shape (samples,)."""
    if not shuffle:
        return numpy.arange(samples)
    words = [number >> shift & 0xffffffff
             for number in (seed, epoch) for shift in (0, 32)]
    # Not a Generator: NumPy may change the numbers that those draw.
    return numpy.random.RandomState(words).permutation(samples)


def batches_left(rest: int, batch: int, ranks: int) -> int:
    """Batches that the last ``rest`` samples of an epoch make on each rank.

    As few as batches of ``batch`` samples allow, but no more than leave a
    sample for each rank in each of them.
    """
    return max(1, min(-(-rest // (batch * ranks)), rest // ranks))


def next_step(position: EpochPosition, samples: int, batch: int,
              ranks: int) -> GlobalBatch:
    """The global batch at a position of an epoch of so many samples.

    Args:
        position: Where it begins.
        samples: In an epoch.
        batch: Samples of a batch on one rank, at most.  Only where this is 1
            and the ranks do not divide the samples, there can be 2.
        ranks: How many there are.

    Raises:
        ValueError: There is not a sample for each rank.
    """
    rest = samples - position.used
    if rest < ranks:
        raise ValueError(
            f'the epoch has {rest} sample{"s" * (rest != 1)} left, which is '
            f'less than one for each of the {ranks} ranks; finish it with as '
            'many ranks as it was begun with')
    stop = position.used + -(-rest // batches_left(rest, batch, ranks))
    after = (EpochPosition(position.epoch + 1) if stop == samples
             else EpochPosition(position.epoch, stop))
    return GlobalBatch(position.epoch, position.used, stop, after)


def others(step: GlobalBatch, samples: int, batch: int,
           ranks: int) -> Iterator[GlobalBatch]:
    """The other steps of an epoch: those behind ``step``, then those before.

    Where other ranks began the epoch, its first steps were not these, and
    the last of them may reach into ``step``.
    """
    for position, stop in ((step.after, samples),
                           (EpochPosition(step.epoch), step.start)):
        while position.used < stop and position.epoch == step.epoch:
            yield (other := next_step(position, samples, batch, ranks))
            position = other.after


def part(step: GlobalBatch, rank: int, ranks: int) -> slice:
    """The slice of the epoch's order that a rank has of a step."""
    size = step.stop - step.start
    return slice(step.start + size * rank // ranks,
                 step.start + size * (rank + 1) // ranks)


def largest_part(samples: int, batch: int, ranks: int) -> int:
    """Most samples of a batch of one rank."""
    return min(-(-samples // ranks), batch if batch > 1 or ranks == 1 else 2)
