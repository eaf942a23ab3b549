"""Gradients as fp8 ratios to their parameters (Algorithm 1 of the fp8 paper).

The paper: Oyama, Nomura, Sato, Matsuoka, "Reducing communication in
data-parallel deep learning with low-precision floating-point numbers".  A
gradient g of a parameter w travels as ::

    wire = fp8(g / (|w| + epsilon) * scale),    scale = 57344 / (q * headroom)

where q, one number per tensor, is the Q-quantile of |g| / (|w| + epsilon)
over at most R sampled elements, renewed every N updates (lines 9 to 15).

Two things go beyond the paper, and both can be switched off:

``headroom``
    The paper clips whatever lies above q, 5 % of all elements for Q = 0.95.
    Clipped is worse than rounded: error feedback can never catch up with an
    element that is clipped at every update.  The room comes from the other
    end: normal codes then reach down to 1.06e-9 q headroom, and the error of
    a round trip falls from 0.38 with the paper's 1 to 0.053 from 2^10 to 2^14
    (benchmarks/headroom.py).

``error_feedback``
    What an encoding loses is added to the next gradient.  Residuals are kept
    in the gradient's units: parameters and scales change between updates.
    None is larger than the Q-quantile of |g|, which is found with q: what
    saturation cuts off an outlier, and most of what rounding does, is given
    up, or one faulty gradient would be sent again and again, up to for ever.
    Rounding to nearest never leaves out as much of elements that are less
    than eight times as large as this quantile.
"""
from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from .. import fp8
from .codec import Codec, Residuals
from .scales import limited, sampled_quantiles
from .staging import download, output, upload, upload_now
from .tensors import (
    FP8,
    Compiled,
    Tensors,
    array_module,
    compile_sizes,
    compile_tensors,
)

# Of a code: all bits set in infinities and NaN only.
_EXPONENT = numpy.uint8(0x7C)


class TensorReport(NamedTuple):
    """What became of one tensor (see :meth:`Fp8Ratio.report`)."""

    q: float            # quantile of the ratio |D| in use, no unit; 0: none
    clipped: int        # elements saturated so far
    encoded: int        # elements encoded so far


class Fp8Ratio(Codec):
    """fp8 on the wire, scaled per tensor by the ratio to the parameter.

    Arguments are not checked here but where users give them, in
    :class:`chainer_fp8pipe.communicators.options.Fp8Options`.

    Args:
        rounding: ``'nearest'``, ``'truncate'`` (the paper's) or
            ``'stochastic'`` (encodings; sums of wires round to nearest).
        period: Updates from one choice of q to the next (the paper's N), at
            least 1.
        quantile: Which quantile of the ratios q is (the paper's Q), 0 to 1.
        samples: Elements it is estimated from, at most (the paper's R).
        epsilon: Keeps the ratio finite where a parameter is zero; positive.
        headroom: How far above q values may lie before they are clipped, at
            least 1, which is the paper's.
        error_feedback: Whether residuals are carried to the next update.
        seed: Of the sampling and of stochastic rounding, together with
            ``rank``.
        rank: This rank, so that ranks round independently of each other.
    """

    name = 'fp8'
    wire_dtype = numpy.dtype('uint8')

    def __init__(self, *, rounding: str = 'nearest', period: int = 100,
                 quantile: float = 0.95, samples: int = 1024,
                 epsilon: float = 1e-5, headroom: float = 4096.0,
                 error_feedback: bool = True, seed: int = 0,
                 rank: int = 0) -> None:
        super().__init__()
        self.rounding = rounding
        self.epsilon = epsilon
        self.headroom = headroom
        self.error_feedback = error_feedback
        self._period = period
        self._quantile = quantile
        self._samples = samples
        self._seed = (seed, rank)
        self._updates = 0
        self._loss_scale = 1.0
        self._q: dict[str, float] = {}
        self._bounds: dict[str, float] = {}     # of residuals
        self._age: dict[str, int] = {}      # updates since q was chosen
        self._clipped: dict[str, int] = {}
        self._encoded: dict[str, int] = {}
        self._residuals = Residuals()

    # --- an update ---------------------------------------------------------

    def start(self, loss_scale: float) -> None:
        super().start(loss_scale)
        # All that was learnt from gradients grows with their factor.
        if loss_scale != self._loss_scale:
            factor = loss_scale / self._loss_scale
            self._residuals.multiply(factor)
            for found in self._q, self._bounds:
                found.update({name: limited(value * factor)
                              for name, value in found.items()})
            self._loss_scale = loss_scale
        self._updates += 1

    def propose(self, tensors: Tensors) -> numpy.ndarray | None:
        due = self._due(tensors)
        return numpy.array([sampled_quantiles(
            tensors.gradients[index], tensors.parameters[index],
            quantile=self._quantile, samples=self._samples,
            epsilon=self.epsilon, seed=(
                *self._seed, self._updates,
                zlib.crc32(tensors.names[index].encode())))
            for index in due], numpy.float32).T.flatten() if due else None

    def settle(self, tensors: Tensors, largest: numpy.ndarray | None
               ) -> None:
        if largest is not None:
            for index, q, bound in zip(
                    self._due(tensors), *largest.reshape(2, -1).tolist(),
                    strict=True):
                name = tensors.names[index]
                self._age[name] = 0
                if q > 0:
                    self._q[name] = limited(q)
                    self._bounds[name] = limited(bound)
        for name in tensors.names:
            self._age[name] += 1

    def encode(self, tensors: Tensors, wire: numpy.ndarray,
               prescale: float = 1.0, start: int = 0) -> None:
        out = output(tensors.xp, wire)
        whole = 0, tensors.size
        for index, part, place in tensors.overlaps(start, start + wire.size):
            name = tensors.names[index]
            gradient = tensors.gradients[index][part]
            counts = self._encode_part(
                tensors, index, part, gradient, out[place],
                prescale, 'gradient', whole)
            self._count(name, counts.clipped, gradient.size)
            if counts.nonfinite:
                finite = tensors.xp.isfinite(gradient).all()
                self.blame(
                    f'the {"value" if finite else "gradient"} of {name}')
        download(out, wire)

    def accumulate(self, wire: numpy.ndarray, total: Any) -> None:
        fp8.accumulate(upload(array_module(total), wire), total)

    def encode_mean(self, tensors: Tensors, total: Any, count: int,
                    wire: numpy.ndarray, start: int, site: str,
                    owned: tuple[int, int]) -> None:
        out = output(tensors.xp, wire)
        total /= numpy.float32(count)
        for index, part, place in tensors.overlaps(start, start + wire.size):
            name = tensors.names[index]
            parameter = tensors.parameters[index][part]
            mean = total[place]
            fp8.ratio_decode(mean, parameter, mean,
                             scale=self._scale(name), epsilon=self.epsilon)
            counts = self._encode_part(tensors, index, part, mean, out[place],
                                       1.0, site, owned)
            self._count(name, counts.clipped, 0)
            if counts.nonfinite and not tensors.xp.isfinite(parameter).all():
                self.blame(f'the value of {name}')
        download(out, wire)

    def decode(self, tensors: Tensors, wire: numpy.ndarray, start: int = 0
               ) -> list[str]:
        codes = upload_now(tensors.xp, wire)
        return [
            tensors.names[index]
            for index, part, place in tensors.overlaps(start,
                                                       start + wire.size)
            if fp8.ratio_decode(
                codes[place], tensors.parameters[index][part],
                tensors.gradients[index][part],
                scale=self._scale(tensors.names[index]),
                epsilon=self.epsilon)]

    def compiled(self, tensors: Tensors, prescale: float) -> Compiled | None:
        # Random numbers are seeded with names, in Python.
        if self.rounding == 'stochastic' or tensors.xp is not numpy:
            return None
        return compile_tensors(
            FP8, tensors, self.residuals_of_gradients(tensors),
            **self._of_codec(tensors, prescale))

    def compiled_sums(self, tensors: Tensors,
                      owned: Sequence[tuple[int, int]]) -> Compiled | None:
        if self.rounding == 'stochastic':
            return None
        made = compile_sizes(FP8, tensors, **self._of_codec(tensors, 1.0))
        made.fetch_parameters(tensors, owned)
        return made

    def _of_codec(self, tensors: Tensors, prescale: float) -> dict[str, Any]:
        """What tables say of the codec."""
        return {'rounding': fp8.ROUNDINGS.index(self.rounding),
                'epsilon': self.epsilon, 'scales': numpy.array([
                    (*fp8.with_inverse(self._scale(name) * prescale),
                     *fp8.with_inverse(self._scale(name)), self._bound(name))
                    for name in tensors.names],
                    numpy.float32).reshape(-1, 5)}

    def conclude(self, compiled: Compiled, tensors: Tensors) -> None:
        super().conclude(compiled, tensors)
        for name, gradient, (clipped, encoded) in zip(
                tensors.names, tensors.gradients, compiled.counts(),
                strict=True):
            if gradient.size:
                self._count(name, clipped, encoded)

    def is_finite(self, wire: numpy.ndarray) -> bool:
        return not ((wire & _EXPONENT) == _EXPONENT).any()

    def add(self, wire: numpy.ndarray, total: numpy.ndarray) -> None:
        # Inside MPI_Allreduce several ranks may make the same sum, each for
        # itself, and must get the same: it is never rounded at random.
        rounding = ('nearest' if self.rounding == 'stochastic'
                    else self.rounding)
        fp8.add(wire, total, total, rounding=rounding)

    def rescale(self, wire: numpy.ndarray, factor: float) -> None:
        values = numpy.empty(wire.size, numpy.float32)
        fp8.decode(wire, values)
        values *= numpy.float32(factor)
        fp8.encode(values, wire, rounding=self.rounding,
                   seed=self._rounding_seed('rescale'))

    # --- report and state ---------------------------------------------------

    def quantile_of(self, name: str) -> float:
        """q of a tensor; 0 if all its gradients have been zero."""
        return self._q.get(name, 0.0)

    def report(self) -> dict[str, TensorReport]:
        """Per tensor: q and the counts of clipped and encoded elements.

        The counts are this rank's own, and grow from the first fp8 update.
        Both encodings can clip, so a tensor's second one adds to ``clipped``
        on the ranks that made it.
        """
        return {name: TensorReport(self.quantile_of(name),
                                   self._clipped[name], encoded)
                for name, encoded in self._encoded.items()}

    def state(self) -> dict[str, numpy.ndarray]:
        state = {'updates': numpy.asarray(self._updates),
                 'loss_scale': numpy.asarray(self._loss_scale)}
        for kind, values in self._by_name().items():
            for name, value in values.items():
                state[f'{kind}|{name}'] = numpy.asarray(value)
        for key, array in self._residuals.state().items():
            state[f'residual|{key}'] = array
        return state

    def load_state(self, state: dict[str, numpy.ndarray]) -> None:
        saved = self._by_name()
        unknown = [key for key in state if key.partition('|')[0] not in
                   (*saved, 'residual', 'updates', 'loss_scale')]
        if unknown or 'updates' not in state:
            raise ValueError('this is no state of the fp8 codec: '
                             f'{sorted(unknown or state)}')
        self._updates = int(state['updates'])
        self._loss_scale = float(state['loss_scale'])
        for values in saved.values():
            values.clear()
        residuals = {}
        for key, array in state.items():
            kind, separator, name = key.partition('|')
            if kind == 'residual':
                residuals[name] = array
            elif separator:
                saved[kind][name] = array.item()
        self._residuals = Residuals(residuals)

    # --- details -----------------------------------------------------------

    def _by_name(self) -> dict[str, dict[str, Any]]:
        return {'q': self._q, 'bound': self._bounds, 'age': self._age,
                'clipped': self._clipped, 'encoded': self._encoded}

    def _due(self, tensors: Tensors) -> list[int]:
        # A tensor that is not in every update has a period of its own, and
        # one that has shown nothing but zeros has no q yet.  Ages and q are
        # the same on all ranks, so all ranks agree about who is due.
        return [index for index, name in enumerate(tensors.names)
                if name not in self._q or self._age[name] >= self._period]

    def _scale(self, name: str) -> float:
        # Without a q the tensor is zero on all ranks: any scale will do.
        q = self.quantile_of(name) or fp8.MAX
        return fp8.MAX / (q * self.headroom)

    def _bound(self, name: str) -> float:
        return self._bounds.get(name, math.inf)

    def _encode_part(self, tensors: Tensors, index: int, part: slice,
                     values: Any, out: Any, prescale: float, site: str,
                     owned: tuple[int, int]) -> fp8.Counts:
        return fp8.ratio_encode(
            values, tensors.parameters[index][part], out,
            scale=self._scale(tensors.names[index]) * prescale,
            epsilon=self.epsilon, residual=self.owned_residual(
                tensors, index, part, site, owned),
            bound=self._bound(tensors.names[index]),
            rounding=self.rounding, seed=self._rounding_seed(
                f'{site}:{part.start} {tensors.names[index]}'))

    def residual_norms(self) -> dict[str, float]:
        return self._residuals.norms()

    def residual(self, xp: Any, site: str, name: str, start: int,
                  stop: int) -> Any:
        if not self.error_feedback:
            return None
        return self._residuals.get(xp, site, name, start, stop)

    def _rounding_seed(self, place: str, index: int = 0) -> int:
        if self.rounding != 'stochastic':
            return 0
        # Encodings that share random bits would err in the same direction.
        sequence = numpy.random.SeedSequence(
            (*self._seed, self._updates, index, zlib.crc32(place.encode())))
        return int(sequence.generate_state(1)[0])

    def _count(self, name: str, clipped: int, encoded: int) -> None:
        self._clipped[name] = self._clipped.get(name, 0) + int(clipped)
        self._encoded[name] = self._encoded.get(name, 0) + encoded
