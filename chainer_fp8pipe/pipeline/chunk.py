"""Consecutive layers on one rank, and what their micro-batches keep."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from chainer.link_hooks import SpectralNormalization

from . import linear
from .batch_statistics import BatchStatistics, recomputing
from .gradient_sums import GradientSums
from .layers import Layer, LayerError, as_variables, blame, layer_name
from .randomness import Place, at
from .tape import AnyTape, Arrays, record

#: Layers that draw no random numbers once their parameters are there, and so
#: need no seeding: it costs as much as a small layer.
_STILL_LINKS = (L.Linear, L.Convolution2D, L.Deconvolution2D, L.EmbedID,
                L.BatchNormalization, L.LayerNormalization)
_STILL_FUNCTIONS = (F.relu, F.leaky_relu, F.elu, F.sigmoid, F.tanh)


class Chunk:
    """Runs layers forward and backward, one micro-batch at a time.

    Args:
        layers: Consecutive layers of the whole model.
        first: There is no layer before these; nobody wants the gradient of
            the input.
        recompute: Keep the inputs only, and run forward again before
            backward (Griewank and Walther, Algorithm 799; Chen et al. 2016).
        sums: Where gradients of parameters are added up.
        statistics: Of the batch normalisations.
        parameters: Of the whole stage.
        initial_seed: Of parameters that get their shape from the first input.
        xp: ``numpy`` or ``cupy``: where the layers are.
    """

    def __init__(self, layers: Sequence[Layer], *, first: bool,
                 recompute: bool, sums: GradientSums,
                 statistics: BatchStatistics,
                 parameters: list[chainer.Parameter],
                 initial_seed: int = 0, xp: Any = numpy) -> None:
        self.recompute = recompute
        self._layers = tuple(layers)
        self._first = first
        self._sums = sums
        self._statistics = statistics
        self._parameters = parameters
        self._initial_seed = initial_seed
        self._xp = xp
        self._inputs: dict[int, tuple[Arrays, Place]] = {}
        self._tapes: dict[int, list[AnyTape]] = {}
        self._still: set[int] = set()

    @property
    def layers(self) -> list[Any]:
        """What is called, one after the other."""
        return [layer for _, layer in self._layers]

    @property
    def live(self) -> int:
        """How many micro-batches wait for their backward pass."""
        return len(set(self._inputs) | set(self._tapes))

    def infer(self, micro_batch: int, arrays: Arrays,
              place: Place) -> Arrays:
        """Forward only, as Chainer's configuration says; keeps nothing."""
        for index, layer in self._layers:
            with blame(layer_name(index, layer), micro_batch), \
                    self._seeded(index, layer, place):
                arrays = _call(layer, arrays)
        return arrays

    def forward(self, micro_batch: int, arrays: Arrays,
                place: Place) -> Arrays:
        """The outputs for one micro-batch; keeps what backward needs.

        Args:
            micro_batch: Its number.
            arrays: The inputs.
            place: Where we are; the layer is filled in here.

        Raises:
            LayerError: Naming the layer.
        """
        self._statistics.next_micro_batch(self._layers[0][0])
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
        """Runs forward again if that was asked for."""
        if micro_batch in self._inputs:
            arrays, place = self._inputs.pop(micro_batch)
            with recomputing(layer for _, layer in self._layers):
                self._tapes[micro_batch], _ = self._record(
                    micro_batch, arrays, place)

    def backward(self, micro_batch: int, gradients: Arrays,
                 defer: bool = False, last: bool = False) -> Arrays:
        """Gradients of the inputs; those of parameters go into the sums.

        Args:
            micro_batch: Its number; :meth:`forward` has seen it.
            gradients: Of the outputs; None where there is none.
            defer: Leave out what :meth:`backward_weight` can do later.
            last: It is the step's last micro-batch.
        """
        tapes = (self._tapes[micro_batch] if defer
                 else self._tapes.pop(micro_batch))
        for position in reversed(range(len(tapes))):
            with self._blame_backward(position, micro_batch):
                gradients = tapes[position].backward(
                    gradients, self._sums, defer)
            if not defer:
                tapes.pop()         # frees its activations at once
            if last and not defer:
                self._sums.through(self._layers[position][1])
        self._sums.collect(self._parameters)
        return gradients

    def backward_weight(self, micro_batch: int, last: bool = False) -> None:
        """What a deferring :meth:`backward` left out."""
        tapes = self._tapes.pop(micro_batch)
        for position in reversed(range(len(tapes))):
            with self._blame_backward(position, micro_batch):
                tapes.pop().backward_weight(self._sums)
            if last:
                self._sums.through(self._layers[position][1])

    def settle(self) -> None:
        """Adds what the sums have put off to a larger product."""
        self._sums.settle(layer for _, layer in self._layers)

    def forget(self) -> None:
        """Drops all micro-batches, after a step that failed."""
        self._inputs.clear()
        self._tapes.clear()

    # --- details ------------------------------------------------------------

    def _blame_backward(self, position: int, micro_batch: int
                        ) -> contextlib.AbstractContextManager[None]:
        name = layer_name(*self._layers[position])
        return blame(f'the backward pass of {name}', micro_batch)

    def _record(self, micro_batch: int, arrays: Arrays,
                place: Place) -> tuple[list[AnyTape], Arrays]:
        tapes: list[AnyTape] = []
        wanted = tuple(not self._first and array.dtype.kind == 'f'
                       for array in arrays)
        for index, layer in self._layers:
            with blame(layer_name(index, layer), micro_batch), \
                    self._seeded(index, layer, place):
                tape, arrays = record(layer, arrays, wanted)
            tapes.append(tape)
            wanted = tape.wants
        return tapes, arrays

    def _refuse_moving_weights(self) -> None:
        for index, layer in self._layers:
            for link in (layer.links() if isinstance(layer, chainer.Link)
                         else ()):
                if any(isinstance(hook, SpectralNormalization)
                       for hook in link.local_link_hooks.values()):
                    raise LayerError(
                        f'{layer_name(index, layer)} has spectral '
                        'normalisation, whose vectors move on with every '
                        'forward pass; it cannot be recomputed: pass '
                        "recompute='no stage'")

    @contextlib.contextmanager
    def _seeded(self, index: int, layer: Any, place: Place) -> Iterator[None]:
        if index in self._still and all(
                hook is self._statistics        # others may draw
                for hook in chainer._get_link_hooks().values()):
            yield
            return
        initial = None
        if not _has_all(layer):
            # Initial values must be the same on every replica.
            initial = Place(self._initial_seed, 0, index, 0)
        elif _draws_nothing(layer):
            self._still.add(index)
        with at(place._replace(layer=index), self._xp, initial):
            yield


def _call(layer: Any, arrays: Arrays) -> Arrays:
    """Without a graph, but with variables, as layers get them in training.

    Some functions give another dtype to arrays, and what works in place on
    an array makes a new variable.
    """
    if linear.is_plain(layer, arrays):
        return (linear.forward(layer, arrays[0]),)
    outputs = layer(*[chainer.Variable(array, requires_grad=False)
                      for array in arrays])
    return tuple(output.array for output in as_variables(outputs))


def _has_all(layer: Any) -> bool:
    return not isinstance(layer, chainer.Link) or all(
        parameter.array is not None for parameter in layer.params())


def _draws_nothing(layer: Any) -> bool:
    if type(layer) in _STILL_LINKS:
        return not layer.local_link_hooks
    return any(layer is function for function in _STILL_FUNCTIONS)
