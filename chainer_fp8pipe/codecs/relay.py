"""Codecs for a rank that sums for others and has no model.

Such a rank gets, with every job, the *recipe* of a codec: the wire's format
and, where residuals are kept, the tensors in the job's range.  It has no
parameters to turn a ratio back into a gradient.  So the mean of fp8 wires is
encoded as it is, in units of the wire, and what the encoding lost is kept in
these units too.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy

from .. import fp8
from ..block_formats import FORMATS
from .block_scaled import BlockScaled
from .cast import Cast
from .codec import Codec, Residuals
from .fp8_ratio import Fp8Ratio
from .tensors import RELAY, Compiled, Tensors, compile_sizes


class RelayedTensor(NamedTuple):
    """A tensor, or what of it lies in a job's range.

    Attributes:
        name: Different from that of any other part.
        size: Elements.
        unit: A number on the wire, times this, grows with the gradient and
            nothing else: of fp8 q of the tensor over the loss scale, or 0 if
            it is not known; of blocks what they divide gradients by, without
            the loss scale.
    """

    name: str
    size: int
    unit: float


@dataclasses.dataclass(frozen=True)
class CodecRecipe:
    """What a rank without a model must know of a codec for one job.

    Attributes:
        codec: The codec's name.
        rounding: Of fp8.
        error_feedback: Of fp8 and of formats in blocks.
        parts: Of these: what lies in the range, end to end.
        headroom: Of fp8.
    """

    codec: str
    rounding: str = ''
    error_feedback: bool = False
    parts: tuple[RelayedTensor, ...] = ()
    headroom: float = 1.0

    @classmethod
    def of(cls, codec: Codec, tensors: Tensors, start: int, stop: int
           ) -> CodecRecipe:
        """The recipe of a codec for ``[start, stop)`` of its update."""
        if not isinstance(codec, (BlockScaled, Fp8Ratio)):
            return cls(codec.name)
        parts = []
        for index, part, _ in tensors.overlaps(start, stop):
            name, size = tensors.names[index], part.stop - part.start
            unit = (codec.quantile_of(name) / tensors.loss_scale
                    if isinstance(codec, Fp8Ratio) else 1 / codec.over_unit)
            if size != tensors.gradients[index].size:
                name = f'{name}[{part.start}:{part.stop}]'
            parts.append(RelayedTensor(name, size, unit))
        if isinstance(codec, BlockScaled):
            return cls(codec.name, '', codec.error_feedback, tuple(parts))
        return cls(codec.name, codec.rounding, codec.error_feedback,
                   tuple(parts), codec.headroom)

    def make(self, kept: RelayState, seed: int, rank: int
            ) -> tuple[Codec, Tensors]:
        """The codec for the next job of those that share ``kept``.

        And the range as tensors without values.  Stochastic rounding is
        seeded with ``seed``, ``rank`` (this rank) and the job's number.
        """
        kept.jobs += 1
        # Only their sizes are asked for: no memory.
        nothing = [numpy.broadcast_to(numpy.float32(0), part.size)
                   for part in self.parts]
        blocks = self.codec in FORMATS
        tensors = Tensors([part.name for part in self.parts], nothing,
                          nothing, grain=BlockScaled.grain if blocks else 1)
        units = {part.name: part.unit for part in self.parts}
        if blocks:
            return RelayedBlocks(kept, units, values=self.codec,
                                 error_feedback=self.error_feedback), tensors
        if self.codec != 'fp8':
            return Cast(self.codec), tensors
        return Relay(kept, units, rounding=self.rounding, seed=seed,
                     rank=rank, headroom=self.headroom,
                     error_feedback=self.error_feedback), tensors


class RelayState:
    """Keeps what one job of a codec leaves to the next.

    Attributes:
        jobs: How many there were.
        residuals: In units of the wire.
        units: By site and part, the unit that its residual was last
            rescaled for.
    """

    def __init__(self) -> None:
        self.jobs = 0
        self.residuals = Residuals()
        self.units: dict[tuple[str, str], float] = {}


class _Relayed(Codec):
    """What both have in common: residuals in units that change.

    It is good for one job: jobs that are under way at the same time round
    with random numbers of their own, in whatever order they come to it.

    Args:
        kept: What remains from the jobs before, and is to remain.
        units: By part, see :class:`RelayedTensor`.
        options: Of the codec.

    Attributes:
        bound: The largest residual.
    """

    # Beyond it the sum of a residual and a mean might not be finite.
    bound = 1e38

    def __init__(self, kept: RelayState, units: Mapping[str, float],
                 **options: Any) -> None:
        super().__init__(**options)
        self._residuals = kept.residuals
        self._kept = kept
        self._units = units

    def residual(self, xp: Any, site: str, name: str, start: int,
                 stop: int) -> Any:
        residual = super().residual(xp, site, name, start, stop)
        unit = self._units[name]
        if residual is None or unit == 0.0:     # all zeros leave nothing out
            return residual
        old = self._kept.units.get((site, name), unit)
        self._kept.units[site, name] = unit
        if old != unit:
            with numpy.errstate(over='ignore'):
                residual *= numpy.float32(min(old / unit, 1e38))
            numpy.clip(residual, -self.bound, self.bound, out=residual)
        return residual


class RelayedBlocks(_Relayed, BlockScaled):
    """Blocks without gradients: adds wires and encodes their mean."""

    def compiled(self, tensors: Tensors, prescale: float) -> Compiled | None:
        return self.compiled_sums(tensors, ())


class Relay(_Relayed, Fp8Ratio):
    """fp8 without parameters: adds wires and encodes their mean.

    The residual of an element is what all encodings of its mean have left
    out, as :class:`.Fp8Ratio` has it, but in units of the wire: a number r
    stands for the gradient ``r (|w| + epsilon) / scale``.  When a tensor
    gets another scale, r is multiplied so that this stays the same.  It is
    not when the parameter changes, so that what is left out grows and
    shrinks with |w| until it is made up for.  That is one update later for
    most elements, and an update changes few parameters by much.
    """

    def __init__(self, kept: RelayState, units: Mapping[str, float],
                 **options: Any) -> None:
        super().__init__(kept, units, **options)
        self._updates = kept.jobs
        # q, as the wire has it: the gradients themselves are not known.
        self.bound = fp8.MAX / self.headroom

    def encode_mean(self, tensors: Tensors, total: Any, count: int,
                    wire: numpy.ndarray, start: int, site: str,
                    owned: tuple[int, int]) -> None:
        total /= numpy.float32(count)
        for index, part, place in tensors.overlaps(start, start + wire.size):
            mean, codes = total[place], wire[place]
            residual = self.owned_residual(tensors, index, part, site, owned)
            if residual is not None:
                mean += residual
            fp8.encode(mean, codes, rounding=self.rounding,
                       seed=self._rounding_seed(f'{site}:{start}', index))
            if residual is not None:
                fp8.decode(codes, residual)
                _subtract_from(mean, residual, self.bound)

    def compiled(self, tensors: Tensors, prescale: float) -> Compiled | None:
        if self.rounding == 'stochastic':
            return None
        return compile_sizes(
            RELAY, tensors, rounding=fp8.ROUNDINGS.index(self.rounding),
            scales=numpy.full((len(tensors.names), 5), self.bound,
                              numpy.float32))


def _subtract_from(mean: numpy.ndarray, residual: numpy.ndarray,
                   bound: float) -> None:
    """``residual = mean - residual``, bounded; 0 where it is not finite."""
    with numpy.errstate(invalid='ignore', over='ignore'):
        numpy.subtract(mean, residual, out=residual)
        if not numpy.isfinite(residual.sum()):
            residual[~numpy.isfinite(residual)] = 0
    numpy.clip(residual, -bound, bound, out=residual)
