"""The samples of each batch on each rank: a pure function of the position."""
# An epoch is one order of all samples, from the seed and the epoch's number.
# It is cut into global batches and each of these into one part per rank, by
# the position in the epoch alone.  So every rank makes as many batches, and a
# run goes on at any sample, also with other ranks or another batch size.
#
# No sample is left out or repeated.  The samples that are left take the n
# batches that they need, whose sizes differ by one at most, on a rank too.
from __future__ import annotations

import numpy


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


def batch_stop(start: int, samples: int, batch: int, ranks: int) -> int:
    """Where the global batch ends that begins at a place of an epoch.

    Args:
        start: Samples of the epoch that were used.
        samples: In the epoch.
        batch: Samples of a batch on one rank, at most.  Only where this is 1
            and the ranks do not divide the samples, there can be 2.
        ranks: How many there are.

    Raises:
        ValueError: There is not a sample for each rank.
    """
    rest = samples - start
    if rest < ranks:
        raise ValueError(
            f'the epoch has {rest} sample{"s" * (rest != 1)} left, too few '
            f'for {ranks} ranks; finish it with as many ranks as it was begun '
            f'with, or use at most {max(1, rest)} ranks')
    return start + -(-rest // batches_left(rest, batch, ranks))


def part(start: int, stop: int, rank: int, ranks: int) -> slice:
    """The slice of the epoch's order that a rank has of a global batch."""
    size = stop - start
    return slice(start + size * rank // ranks,
                 start + size * (rank + 1) // ranks)
