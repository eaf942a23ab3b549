"""Arrays of records and what can be done with them."""
from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy

from ..fp8.arrays import are_on_gpu, is_cupy, may_share_memory
from . import _records

#: Elements that share a scale.
RECORD = 32

_FLOAT = numpy.dtype(numpy.float32)


@dataclass(frozen=True)
class RecordFormat:
    """A format; see the package.

    All arrays of a call are NumPy's, or all are CuPy's.  CuPy has no records,
    so there they are the rows that :meth:`rows` makes of them.

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

    def rows(self, records: numpy.ndarray) -> numpy.ndarray:
        """The bytes of m records, uint8[m, nbytes], in the same memory."""
        return records.view(numpy.uint8).reshape(-1, self.nbytes)

    def encode(self, values: Any, records: Any, *, factor: float = 1.0,
               residual: Any = None) -> int:
        """Rounds values to the nearest ones of the format, ties to even.

        With c = values * factor + residual, records hold c, and what they
        leave out of c becomes the new residual; 0 where a record holds a NaN
        or an infinity.  Of a record's largest element no more is kept than
        the next largest one has.

        Args:
            values: float32[n].
            records: Of :attr:`dtype`, or CuPy's rows, n / 32 of them,
                rounded up; written.
            factor: Float32, not negative.
            residual: float32[n], changed in place; None: no feedback.

        Returns:
            How many records hold a NaN or an infinity.

        Raises:
            TypeError: An array is not of its dtype, or not where others are.
            ValueError: Sizes do not go together, or an array is not
                C-contiguous or overlaps another one.
        """
        loops = self._loops_for(records, values=values, **(
            {} if residual is None else {'residual': residual}))
        if residual is not None:
            if residual.size != values.size:
                raise ValueError(f'residual has {residual.size} elements, '
                                 f'values has {values.size}')
            if may_share_memory(values, residual):
                raise ValueError('residual shares memory with values')
        return loops.encode(values, factor, residual, records, self.number)

    def decode(self, records: Any, out: Any, *, factor: float = 1.0) -> int:
        """Writes the records' values times a factor.

        Args:
            records: As :meth:`encode` has written them.
            out: float32[n], written.
            factor: Float32, not negative.

        Returns:
            How many records hold NaN.
        """
        loops = self._loops_for(records, out=out)
        return loops.decode(records, factor, out, False, self.number)

    def accumulate(self, records: Any, total: Any) -> None:
        """Adds the records' values to float32 sums.

        Args:
            records: As :meth:`encode` has written them.
            total: float32[n], changed in place.
        """
        loops = self._loops_for(records, total=total)
        loops.decode(records, 1.0, total, True, self.number)

    def is_finite(self, records: numpy.ndarray) -> bool:
        """Whether no record holds a NaN or an infinity; not for CuPy's."""
        return not (self.rows(records)[:, -1] == 255).any()

    def _loops_for(self, records: Any, **floats: Any) -> ModuleType:
        """Checks the arguments; the loops of where they are."""
        on_gpu = are_on_gpu({'records': records, **floats})
        self._check_records(records)
        for name, array in floats.items():
            _check_layout(name, array, _FLOAT, ())
            needed = -(-array.size // RECORD)
            if records.shape[0] != needed:
                raise ValueError(f'{array.size} elements of {name} need '
                                 f'{needed} records, not {records.shape[0]}')
            if may_share_memory(records, array):
                raise ValueError(f'{name} shares memory with records')
        if not on_gpu:
            return _records
        from . import record_gpu  # needs CuPy
        return record_gpu

    def _check_records(self, records: Any) -> None:
        if is_cupy(records):
            _check_layout('records', records, numpy.dtype(numpy.uint8),
                          (self.nbytes,))
        else:
            _check_layout('records', records, self.dtype, ())


def _check_layout(name: str, array: Any, dtype: numpy.dtype,
                  row: tuple[int, ...]) -> None:
    """An error unless it is of the dtype, contiguous, and has such rows."""
    dimensions = 1 + len(row)
    if array.dtype != dtype or array.ndim != dimensions:
        raise TypeError(f'{name} has dtype {array.dtype} and {array.ndim} '
                        f'dimensions, expected {dtype} and {dimensions}')
    if array.shape[1:] != row:
        raise ValueError(f'{name} has rows of {array.shape[1]} bytes, '
                         f'expected {row[0]}')
    if not array.flags.c_contiguous:
        raise ValueError(f'{name} must be C-contiguous')


#: By name.
FORMATS = {name: RecordFormat(name, number, nbytes)
           for number, (name, nbytes) in enumerate((
               ('int4', 17), ('e2m1', 17), ('int5', 21)))}
