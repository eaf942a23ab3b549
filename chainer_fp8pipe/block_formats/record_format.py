"""Arrays of records and what can be done with them."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from . import _records

#: Elements that share a scale.
RECORD = 32

_FLOAT = numpy.dtype(numpy.float32)


@dataclass(frozen=True)
class RecordFormat:
    """A format; see the package.

    Attributes:
        name: ``'int4'``, ``'e2m1'`` or ``'int5'``.
        number: That compiled code has for the format.
        nbytes: Of a record.
    """

    name: str
    number: int
    nbytes: int

    @property
    def dtype(self) -> numpy.dtype:
        """Of a record."""
        return numpy.dtype(f'V{self.nbytes}')

    def encode(self, values: numpy.ndarray, records: numpy.ndarray, *,
               factor: float = 1.0, residual: numpy.ndarray | None = None
               ) -> int:
        """Rounds values to the nearest ones of the format, ties to even.

        With c = values * factor + residual, records hold c, and what they
        leave out of c becomes the new residual; 0 where a record holds a NaN
        or an infinity.

        Args:
            values: float32[n].
            records: Of :attr:`dtype`, n / 32 of them, rounded up; written.
            factor: Float32, not negative.
            residual: float32[n], changed in place; None: no feedback.

        Returns:
            How many records hold a NaN or an infinity.

        Raises:
            TypeError: An array is not of its dtype.
            ValueError: Sizes do not go together, or an array is not
                C-contiguous or overlaps another one.
        """
        self._check(records, values=values, **(
            {} if residual is None else {'residual': residual}))
        if residual is not None:
            if residual.size != values.size:
                raise ValueError(f'residual has {residual.size} elements, '
                                 f'values has {values.size}')
            if numpy.may_share_memory(values, residual):
                raise ValueError('residual shares memory with values')
        return _records.encode(values, factor, residual, records, self.number)

    def decode(self, records: numpy.ndarray, out: numpy.ndarray, *,
               factor: float = 1.0) -> int:
        """Writes the records' values times a factor.

        Args:
            records: As :meth:`encode` has written them.
            out: float32[n], written.
            factor: Float32, not negative.

        Returns:
            How many records hold NaN.
        """
        self._check(records, out=out)
        return _records.decode(records, factor, out, False, self.number)

    def accumulate(self, records: numpy.ndarray, total: numpy.ndarray
                   ) -> None:
        """Adds the records' values to float32 sums.

        Args:
            records: As :meth:`encode` has written them.
            total: float32[n], changed in place.
        """
        self._check(records, total=total)
        _records.decode(records, 1.0, total, True, self.number)

    def is_finite(self, records: numpy.ndarray) -> bool:
        """Whether no record holds a NaN or an infinity."""
        scales = records.view(numpy.uint8).reshape(-1, self.nbytes)[:, -1]
        return not (scales == 255).any()

    def _check(self, records: Any, **floats: Any) -> None:
        for name, array, dtype in (
                ('records', records, self.dtype),
                *((name, array, _FLOAT) for name, array in floats.items())):
            if not isinstance(array, numpy.ndarray):
                raise TypeError(f'{name} must be a NumPy array, not '
                                f'{type(array).__name__}')
            if array.dtype != dtype or array.ndim != 1:
                raise TypeError(f'{name} has dtype {array.dtype} and '
                                f'{array.ndim} dimensions, expected {dtype} '
                                'and 1')
            if not array.flags.c_contiguous:
                raise ValueError(f'{name} must be C-contiguous')
        for name, array in floats.items():
            if records.size != -(-array.size // RECORD):
                raise ValueError(
                    f'{array.size} elements of {name} need '
                    f'{-(-array.size // RECORD)} records, not {records.size}')
            if numpy.may_share_memory(records, array):
                raise ValueError(f'{name} shares memory with records')


#: By name.
FORMATS = {name: RecordFormat(name, number, nbytes)
           for number, (name, nbytes) in enumerate((
               ('int4', 17), ('e2m1', 17), ('int5', 21)))}
