"""Operations on records with what they are to be tried on."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from chainer_fp8pipe.block_formats import FORMATS, RECORD, RecordFormat

import numpy as np

from .bit_cases import Case

_FACTORS = (1.0, 0.3, 2.0 ** -40)


def of_records(floats: np.ndarray) -> Iterator[Case]:
    """What takes records, which are rows of bytes here and there."""
    from tests.block_formats import reference
    generator = np.random.default_rng(2)
    for made in FORMATS.values():
        values = np.concatenate([reference.interesting(made.name), floats])
        # Of a NaN, a processor may keep the bits that a format has not.
        finite = np.where(np.isfinite(values), values, 0)
        residual = generator.permutation(finite)
        rows = generator.integers(
            0, 256, (-(-values.size // RECORD), made.nbytes), np.uint8)
        for factor in _FACTORS:
            yield from _encodings(made, values, residual, factor)
            yield _case(made, 'decode', factor=factor, records=rows,
                        out=np.empty_like(values))
        yield _case(made, 'accumulate', records=rows, total=finite)


def _encodings(made: RecordFormat, values: np.ndarray, residual: np.ndarray,
               factor: float) -> Iterator[Case]:
    records = np.zeros((-(-values.size // RECORD), made.nbytes), np.uint8)
    yield _case(made, 'encode', factor=factor, values=values, records=records)
    yield _case(made, 'encode', ' + residual', factor=factor, values=values,
                records=records, residual=residual)


def _case(made: RecordFormat, operation: str, suffix: str = '',
          **given: Any) -> Case:
    options = {name: given.pop(name) for name in ('factor',) if name in given}
    return Case(f'{made.name} {operation}{suffix}',
                _on_rows(made, operation), given, options)


def _on_rows(made: RecordFormat, operation: str) -> Callable[..., Any]:
    def run(records: Any, **others: Any) -> Any:
        if isinstance(records, np.ndarray):
            records = records.view(made.dtype)[:, 0]
        return getattr(made, operation)(records=records, **others)
    return run
