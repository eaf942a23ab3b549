"""Consecutive blocks on one rank, and the state of their micro-batches."""
from __future__ import annotations

import contextlib
from collections.abc import Sequence

import chainer
from chainer.link_hooks import SpectralNormalization
from chainer.links import BatchRenormalization

from ..intercept.function_calls import hold
from ..intercept.unchecked_calls import unchecked
from .batch_statistics import BatchStatistics, recomputing
from .block import AnyTape, Arrays, Block
from .gradient_sums import GradientSums
from .layers import LayerError, blame
from .randomness import Place


class Chunk:
    """Runs blocks forward and backward, one micro-batch at a time.

    Args:
        blocks: Consecutive ones of the whole model.
        number: Of the chunk on its rank, for statistics of batches.
        recompute: Keep the inputs only, and run forward again before
            backward (Griewank and Walther, Algorithm 799; Chen et al. 2016).
        sums: Where gradients of parameters are added up.
        statistics: Of the batch normalisations.
        parameters: Of the whole stage.
    """

    def __init__(self, blocks: Sequence[Block], *, number: int = 0,
                 recompute: bool, sums: GradientSums,
                 statistics: BatchStatistics,
                 parameters: list[chainer.Parameter]) -> None:
        self.recompute = recompute
        self.blocks = tuple(blocks)
        self._number = number
        self._sums = sums
        self._statistics = statistics
        self._parameters = parameters
        self._inputs: dict[int, tuple[Arrays, Place]] = {}
        self._tapes: dict[int, list[AnyTape]] = {}
        hold(self)

    @property
    def live(self) -> int:
        """How many micro-batches wait for their backward pass."""
        return len(set(self._inputs) | set(self._tapes))

    def infer(self, micro_batch: int, arrays: Arrays,
              place: Place) -> Arrays:
        """Forward only, as Chainer's configuration says; keeps nothing."""
        for block in self.blocks:
            with blame(block.name, micro_batch):
                arrays = block.infer(micro_batch, arrays, place)
        return arrays

    def forward(self, micro_batch: int, arrays: Arrays,
                place: Place) -> Arrays:
        """The outputs for one micro-batch; keeps what backward needs.

        The blocks fill in the layer of ``place``.

        Raises:
            LayerError: Naming the block.
        """
        self._statistics.next_micro_batch(self._number)
        if not self.recompute:
            with self._statistics:
                self._tapes[micro_batch], arrays = self._record(
                    micro_batch, arrays, place)
            return arrays
        self._refuse_moving_weights()
        self._inputs[micro_batch] = arrays, place
        with self._statistics, chainer.no_backprop_mode():
            return self.infer(micro_batch, arrays, place)

    def restore(self, micro_batch: int) -> None:
        """Runs forward again for backward, if the chunk recomputes."""
        if micro_batch in self._inputs:
            arrays, place = self._inputs.pop(micro_batch)
            with recomputing(self.blocks):
                self._tapes[micro_batch], _ = self._record(
                    micro_batch, arrays, place)

    def backward(self, micro_batch: int, gradients: Arrays,
                 defer: bool = False, last: bool = False) -> Arrays:
        """Gradients of the inputs; those of parameters go into the sums.

        Args:
            micro_batch: Its number, as in :meth:`forward`.
            gradients: Of the outputs; None where there is none.
            defer: Leave out what :meth:`backward_weight` can do later.
            last: Whether this is the step's last micro-batch.
        """
        tapes = (self._tapes[micro_batch] if defer
                 else self._tapes.pop(micro_batch))
        self._sums.last = last and not defer
        for position in reversed(range(len(tapes))):
            with self._blame_backward(position, micro_batch), unchecked():
                gradients = tapes[position].backward(
                    gradients, self._sums, defer)
            if not defer:
                tapes.pop()         # frees its activations at once
            if last and not defer:
                self._sums.through(self.blocks[position])
        self._sums.collect(self._parameters)
        return gradients

    def backward_weight(self, micro_batch: int, last: bool = False) -> None:
        """Computes what :meth:`backward` with ``defer`` left out."""
        tapes = self._tapes.pop(micro_batch)
        for position in reversed(range(len(tapes))):
            with self._blame_backward(position, micro_batch), unchecked():
                tapes.pop().backward_weight(self._sums)
            if last:
                self._sums.through(self.blocks[position])

    def settle(self) -> None:
        """Adds the products that the sums have put off for these blocks."""
        self._sums.settle(self.blocks)

    def forget(self) -> None:
        """Drops all micro-batches after a failed step."""
        self._inputs.clear()
        self._tapes.clear()

    # --- details ------------------------------------------------------------

    def _blame_backward(self, position: int, micro_batch: int
                        ) -> contextlib.AbstractContextManager[None]:
        name = self.blocks[position].name
        return blame(f'the backward pass of {name}', micro_batch)

    def _record(self, micro_batch: int, arrays: Arrays,
                place: Place) -> tuple[list[AnyTape], Arrays]:
        tapes: list[AnyTape] = []
        wanted = None
        for block in self.blocks:
            with blame(block.name, micro_batch):
                tape, arrays = block.record(micro_batch, arrays, wanted,
                                            place)
            tapes.append(tape)
            wanted = tape.wants
        return tapes, arrays

    def _refuse_moving_weights(self) -> None:
        for block in self.blocks:
            for link in block.links():
                reason = why_once(link)
                if reason and _is_used(link, block):
                    raise LayerError(
                        f'{block.name} has {reason}; it cannot be '
                        "recomputed: pass recompute='no stage'")


def why_once(link: chainer.Link) -> str:
    """Why a link must not run forward twice for a batch; '' if it may."""
    if isinstance(link, BatchRenormalization):
        return ('batch renormalisation, which reads its running averages in '
                'the forward pass')
    # The public attribute makes an empty dictionary where there is none.
    hooks = link._local_link_hooks or {}
    if any(isinstance(hook, SpectralNormalization)
           for hook in hooks.values()):
        return ('spectral normalisation, whose vectors move on with every '
                'forward pass')
    return ''


def _is_used(link: chainer.Link, block: Block) -> bool:
    """Whether a block runs one of its links.

    A stage of a Chain has all links, but only the parameters that it uses.
    """
    own = {id(parameter) for parameter in block.params()}
    found = [getattr(link, name) for name in link._params]
    return not found or any(id(parameter) in own for parameter in found)
