"""What encodings lost, kept for the next one (error feedback)."""
from __future__ import annotations

from typing import Any, NamedTuple

import numpy

from .staging import to_host


class _Residual(NamedTuple):
    start: int          # the part of the tensor that it belongs to
    stop: int
    array: Any          # float32, in the gradient's units


class Residuals:
    """One residual for each tensor at each site of an algorithm.

    A site is a place where a tensor, or the part of it that this rank looks
    after, is encoded.  When the part becomes another one, because tensors
    joined or left the exchange, its residual starts from zero.

    Args:
        state: What :meth:`state` gave.
    """

    def __init__(self, state: dict[str, numpy.ndarray] | None = None) -> None:
        self._residuals: dict[tuple[str, str], _Residual] = {}
        for key, array in (state or {}).items():
            start, stop, site, name = key.split('|', 3)
            if (array.shape != (int(stop) - int(start),)
                    or array.dtype != numpy.float32):
                raise ValueError(
                    f'the residual of {name} is of elements {start} to '
                    f'{stop}, but it is {array.dtype} {array.shape}: the '
                    'snapshot is damaged')
            self._residuals[site, name] = _Residual(
                int(start), int(stop), numpy.array(array))

    def get(self, xp: Any, site: str, name: str, start: int,
            stop: int) -> Any:
        """The residual of ``[start, stop)`` of tensor ``name`` at ``site``.

        The float32 array of ``xp`` that is kept, for the caller to change.
        """
        residual = self._residuals.get((site, name))
        if residual is None or (residual.start, residual.stop) != (
                start, stop):
            array = xp.zeros(stop - start, numpy.float32)
        elif isinstance(residual.array, xp.ndarray):
            return residual.array
        else:       # was restored, and is on the host still
            array = xp.asarray(residual.array)
        self._residuals[site, name] = _Residual(start, stop, array)
        return array

    def multiply(self, factor: float) -> None:
        """Multiplies all residuals, as their gradients are."""
        for residual in self._residuals.values():
            array = residual.array
            array *= numpy.float32(factor)

    def state(self) -> dict[str, numpy.ndarray]:
        """All residuals on the host, for a snapshot."""
        return {f'{start}|{stop}|{site}|{name}': to_host(array)
                for (site, name), (start, stop, array)
                in self._residuals.items()}
