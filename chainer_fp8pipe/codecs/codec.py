"""What an all-reduce algorithm asks of a codec, and error feedback."""
from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy

from .staging import to_host
from .tensors import Compiled, Tensors, places

_NOTHING = numpy.zeros(0, numpy.float32)


class Codec(abc.ABC):
    """Turns gradients into *wire* values and back.

    A wire is a one-dimensional host array of ``wire_dtype`` with one entry
    per ``grain`` elements of each tensor.  An update goes::

        codec.start(loss_scale)
        found = codec.propose(tensors)      # e.g. new scales
        ...                                 # the largest of all ranks
        codec.settle(tensors, found)
        codec.encode(tensors, wire)         # this rank's gradients
        ...                                 # bytes travel
        codec.accumulate(piece, total)      # float32 sums of wire values
        codec.encode_mean(...)              # the mean, ready to travel on
        ...
        codec.decode(tensors, wire)         # means into the gradients

    or, where sums are made in the wire's own format, with :meth:`add` and
    :meth:`rescale` in place of the two in the middle.  After ``start`` the
    tensors may come in groups, each a fused vector with a wire of its own,
    in any order.

    Attributes:
        grain: Elements of a wire's entry.  Sums have as many for each.
        nonfinite: What on this rank made a wire of this update hold a NaN
            or an infinity, e.g. ``'the gradient of /l1/W'``.
    """

    name: str
    wire_dtype: numpy.dtype
    grain = 1

    def __init__(self) -> None:
        self.nonfinite: list[str] = []

    def start(self, loss_scale: float) -> None:
        """Starts an update, whose gradients carry this factor."""
        self.nonfinite = []

    def propose(self, tensors: Tensors) -> numpy.ndarray | None:
        """Finds this rank's part in :meth:`settle`.

        A float32 host array, of which the element-wise maximum over all
        ranks is to be found; None, on all ranks, if there is nothing.
        """
        return None

    def settle(self, tensors: Tensors,              # noqa: B027
               largest: numpy.ndarray | None) -> None:
        """Takes the maximum of what all ranks proposed, before encoding."""

    @abc.abstractmethod
    def encode(self, tensors: Tensors, wire: numpy.ndarray,
               prescale: float = 1.0, start: int = 0) -> None:
        """Writes gradients, times ``prescale``, into a piece of the wire.

        Args:
            tensors: The tensors of this update.
            wire: All of the wire, or a piece; piece by piece, each element
                is to be encoded once.
            prescale: The factor.
            start: Where in the fused vector the piece begins.
        """

    @abc.abstractmethod
    def accumulate(self, wire: numpy.ndarray, total: Any) -> None:
        """Adds the values of ``wire`` to ``total``.

        Args:
            wire: Of n entries.
            total: float32[n * grain].
        """

    @abc.abstractmethod
    def encode_mean(self, tensors: Tensors, total: Any, count: int,
                    wire: numpy.ndarray, start: int, site: str,
                    owned: tuple[int, int]) -> None:
        """Writes ``total / count`` into a piece of the wire.

        Args:
            tensors: The tensors of this update.
            total: Sum of ``count`` wires, made by :meth:`accumulate`; it is
                overwritten.
            count: How many wires were summed.
            wire: The piece.
            start: Where in the fused vector it begins.
            site: Name of the place of this encoding in the algorithm; each
                site has an error-feedback residual of its own.
            owned: The range of the fused vector whose means this rank
                encodes at this site, piece by piece.
        """

    @abc.abstractmethod
    def decode(self, tensors: Tensors, wire: numpy.ndarray, start: int = 0
               ) -> list[str]:
        """Writes the values of a piece of the wire into the gradients.

        Returns:
            The names of tensors to which a NaN or an infinity was written.
        """

    @abc.abstractmethod
    def is_finite(self, wire: numpy.ndarray) -> bool:
        """Whether no value of ``wire`` is a NaN or an infinity.

        A wire is the same on all ranks, so all ranks get the same answer.
        """

    def add(self, wire: numpy.ndarray, total: numpy.ndarray) -> None:
        """``total += wire``, both in the wire's own format.

        Raises:
            NotImplementedError: The format has no sums, see :attr:`adds`.
        """
        raise NotImplementedError(f'{self.name} has no sums')

    def rescale(self, wire: numpy.ndarray, factor: float) -> None:
        """``wire *= factor``, in the wire's own format; raises as above."""
        raise NotImplementedError(f'{self.name} has no sums')

    def compiled(self, tensors: Tensors, prescale: float) -> Compiled | None:
        """What compiled code needs to encode, add and decode by itself.

        Gradients may then be encoded, with ``prescale``, and be decoded
        into; the bits are those of :meth:`encode`, :meth:`add` etc.  None,
        as here, if there is no compiled code for this codec and these arrays.
        """
        return None

    def compiled_sums(self, tensors: Tensors,
                      owned: Sequence[tuple[int, int]]) -> Compiled | None:
        """What compiled code needs of gradients that lie on a device.

        They are encoded and decoded there; between, compiled code sums wires
        and encodes means on the host.  The bits are those of the CPU.

        Args:
            tensors: The tensors of this update, on the device.
            owned: The ranges of the fused vector whose means this rank
                encodes.

        Returns:
            None, as here, if there is no compiled code for this codec.
        """
        return None

    def residuals_of_means(self, compiled: Compiled, tensors: Tensors,
                           site: str, owned: tuple[int, int]
                           ) -> numpy.ndarray:
        """Addresses of what encodings of means leave out, one per tensor.

        Each is that of the tensor's first element, which may lie outside; 0
        where nothing is kept.

        Args:
            compiled: What :meth:`compiled` or :meth:`compiled_sums` returned;
                keeps the arrays.
            tensors: As there.
            site: As for :meth:`encode_mean`.
            owned: As for :meth:`encode_mean`.
        """
        addresses = numpy.zeros(len(tensors.names), numpy.int64)
        residuals = [
            (index, part, residual)
            for index, part, _ in tensors.overlaps(*owned)
            for residual in [self.residual(numpy, site, tensors.names[index],
                                           part.start, part.stop)]
            if residual is not None]
        compiled.kept += [residual for *_, residual in residuals]
        found = places([residual for *_, residual in residuals],
                       writeable=True)
        assert found is not None
        for (index, part, residual), address in zip(
                residuals, found[:, 0].tolist(), strict=True):
            addresses[index] = address - part.start * residual.itemsize
        return addresses

    def owned_residual(self, tensors: Tensors, index: int, part: slice,
                       site: str, owned: tuple[int, int]) -> Any:
        """What encodings of a part of a tensor have left out.

        Args:
            tensors: Of this update.
            index: Of the tensor.
            part: Elements of the tensor.
            site: As for :meth:`encode_mean`.
            owned: As for :meth:`encode_mean`.

        Returns:
            The float32 array that is kept, to be changed; None: nothing is.
        """
        whole = tensors.elements(index, *owned)
        residual = self.residual(tensors.xp, site, tensors.names[index],
                                 whole.start, whole.stop)
        return None if residual is None else residual[
            part.start - whole.start:part.stop - whole.start]

    def residuals_of_gradients(self, tensors: Tensors
                               ) -> list[numpy.ndarray]:
        """What encodings of gradients have left out, one for each tensor.

        The float32 host arrays that are kept; [] if nothing is.
        """
        found = [self.residual(numpy, 'gradient', name, 0, gradient.size)
                 if gradient.size else _NOTHING
                 for name, gradient in zip(tensors.names, tensors.gradients,
                                           strict=True)]
        return [] if any(one is None for one in found) else found

    def residual_norms(self) -> dict[str, float]:
        """2-norms of what encodings of gradients lost on this rank.

        By tensor, in the units of gradients with their loss scale; without
        error feedback there are none.
        """
        return {}

    def residual(self, xp: Any, site: str, name: str, start: int,
                 stop: int) -> Any:
        """As :meth:`Residuals.get`; None, as here: nothing is kept."""
        return None

    def conclude(self, compiled: Compiled, tensors: Tensors) -> None:
        """Adds what compiled code has found to the codec's state."""
        for what in compiled.blamed(tensors.names):
            self.blame(what)

    def blame(self, what: str) -> None:
        """Notes once what made a wire not finite, see ``nonfinite``."""
        if what not in self.nonfinite:
            self.nonfinite.append(what)

    def state(self) -> dict[str, numpy.ndarray]:
        """All that must be saved for an exact continuation."""
        return {}

    def load_state(self, state: dict[str, numpy.ndarray]) -> None:
        """Takes over what :meth:`state` gave.

        Raises:
            ValueError: ``state`` was not made by a codec of this kind.
        """
        if state:
            raise ValueError(
                f'the {self.name} codec has no state, but the snapshot '
                f'holds {sorted(state)}')


class Residuals:
    """What encodings lost, kept for the next one (error feedback).

    There is one residual, in the gradient's units, for each tensor at each
    site of an algorithm: a place where a tensor, or the part of it that this
    rank looks after, is encoded.  When the part becomes another one, because
    tensors joined or left the exchange, its residual starts from zero.

    Args:
        state: What :meth:`state` gave.
    """

    def __init__(self, state: dict[str, numpy.ndarray] | None = None) -> None:
        # By site and tensor: where its part begins, and a float32 array.
        self._residuals: dict[tuple[str, str], tuple[int, Any]] = {}
        for key, array in (state or {}).items():
            start, stop, site, name = key.split('|', 3)
            if (array.shape != (int(stop) - int(start),)
                    or array.dtype != numpy.float32):
                raise ValueError(
                    f'the residual of {name} is of elements {start} to '
                    f'{stop}, but it is {array.dtype} {array.shape}: the '
                    'snapshot is damaged')
            self._residuals[site, name] = int(start), numpy.array(array)

    def get(self, xp: Any, site: str, name: str, start: int,
            stop: int) -> Any:
        """The residual of ``[start, stop)`` of tensor ``name`` at ``site``.

        The float32 array of ``xp`` that is kept, for the caller to change.
        """
        kept, array = self._residuals.get((site, name), (start, None))
        if array is None or (kept, array.size) != (start, stop - start):
            array = xp.zeros(stop - start, numpy.float32)
        elif isinstance(array, xp.ndarray):
            return array
        else:       # was restored, or its tensor has moved
            array = (to_host(array) if xp is numpy else xp.asarray(array))
        self._residuals[site, name] = start, array
        return array

    def norms(self) -> dict[str, float]:
        """The 2-norm of what encodings of gradients lost, by tensor."""
        return {name: float(array.dot(array)) ** 0.5
                for (site, name), (_, array) in self._residuals.items()
                if site == 'gradient'}

    def multiply(self, factor: float) -> None:
        """Multiplies all residuals, as their gradients are."""
        for _, array in self._residuals.values():
            array *= numpy.float32(factor)

    def state(self) -> dict[str, numpy.ndarray]:
        """All residuals on the host, for a snapshot."""
        return {f'{start}|{start + array.size}|{site}|{name}': to_host(array)
                for (site, name), (start, array) in self._residuals.items()}
