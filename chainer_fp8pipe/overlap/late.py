"""The part of a model's exchange that takes place after its update."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..allreduce import Statistics
from ..codecs import Codec, Tensors
from ..exchange.exchange import Exchange, Transfer
from ..exchange.gradients import Gradients
from ..exchange.nonfinite import here
from .bucket_sender import BucketSender
from .deferred_update import Use
from .exchange_thread import ExchangeThread


class Sent(NamedTuple):
    """A bucket on its way, and where its means are wanted."""

    tensors: Tensors
    transfer: Transfer


class Late:
    """Waits for the means of one update, for each when it is wanted.

    Until then the exchange's thread goes on with them.

    Args:
        early: Of the same model.
        overlap: Whose thread it is.
        exchange: Where the buckets are.
        codec: Of this update.
        sent: The buckets.
        gradients: Of the model.
        must_be_finite: Whether NaN and infinity are errors.
        statistics: Counters to add to.
        settle: Raises if the ranks are not in agreement on this update.
    """

    def __init__(self, early: BucketSender, overlap: ExchangeThread,
                 exchange: Exchange,
                 codec: Codec, sent: Sequence[Sent], gradients: Gradients,
                 must_be_finite: bool, statistics: Statistics,
                 settle: Callable[[], None]) -> None:
        self._early = early
        self._overlap = overlap
        self._exchange = exchange
        self._codec = codec
        self._sent = {name: bucket for bucket in sent
                      for name in bucket.tensors.names}
        self._gradients = gradients
        self._must_be_finite = must_be_finite
        self._statistics = statistics
        self._settle = settle
        self._nonfinite: dict[Transfer, list[str]] = {}

    def finish(self, name: str, use: Use | None = None) -> None:
        """Waits for a parameter's bucket; its gradient is then the mean.

        Args:
            name: Of the parameter.
            use: Is given parts of the mean, as they come, if they are where
                the gradient is; others come without.

        Raises:
            ValueError: The ranks are not in agreement.
            RuntimeError: The exchange failed, or a mean of the bucket is NaN
                or infinite.
        """
        if name not in self._sent:      # it has no elements
            return
        tensors, transfer = self._sent[name]
        if transfer not in self._nonfinite:
            with self._statistics.section('exchange'):
                self._settle()
                if self._early.failure:
                    raise RuntimeError('the exchange failed beside the '
                                       f'training: {self._early.failure}')
                # The thread may be in the middle of something longer.
                if not transfer.finished:
                    with self._overlap.taken():
                        self._exchange.finish(transfer, use and self._giver(
                            name, tensors, transfer, use))
                with self._statistics.section('decode'):
                    self._nonfinite[transfer] = transfer.decode(tensors)
        if self._nonfinite[transfer] and self._must_be_finite:
            raise here(self._codec, self._nonfinite[transfer][0])
        self._gradients.write_back(name)

    def _giver(self, name: str, tensors: Tensors, transfer: Transfer,
               use: Use) -> Callable[[], bool] | None:
        """Gives a mean's next parts, until some are used; are there more?"""
        if not self._gradients.is_in_place(name):
            return None
        number = tensors.names.index(name)
        gradient = tensors.gradients[number]
        first, end = tensors.offsets[number:number + 2]
        given = 0

        def give() -> bool:
            nonlocal given
            ranges = transfer.means()
            if given == len(ranges) or (
                    self._must_be_finite and transfer.nonfinite()):
                return False        # there is none, or it will be an error
            with self._statistics.excluded():
                used = False
                while given < len(ranges) and not used:
                    start, stop = ranges[given]
                    given += 1
                    if start < end and stop > first:
                        used = use(max(start, first) - first,
                                   min(stop, end) - first, gradient)
            return given < len(ranges)
        return give
