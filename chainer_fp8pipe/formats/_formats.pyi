from collections.abc import Sequence
from typing import Any

def encode(
    values: Any, out: Any, rounding: int, key0: int, key1: int, /
) -> None: ...
def decode(codes: Any, out: Any, /) -> None: ...
def add(
    a: Any, b: Any, out: Any, rounding: int, key0: int, key1: int, /
) -> None: ...
def accumulate(codes: Any, total: Any, /) -> None: ...
def ratio_encode(
    gradient: Any,
    parameter: Any,
    out: Any,
    residual: Any,
    scale: float,
    inverse: float,
    epsilon: float,
    bound: float,
    rounding: int,
    key0: int,
    key1: int,
    /,
) -> tuple[int, int]: ...
def ratio_decode(
    wire: Any, parameter: Any, out: Any, inverse: float, epsilon: float, /
) -> int: ...
def largest(
    gradient: Any, parameter: Any, epsilon: float, /
) -> tuple[float, float]: ...
def records_encode(
    values: Any, factor: float, residual: Any, records: Any, format: int, /
) -> int: ...
def records_decode(
    records: Any, factor: float, out: Any, adds: bool, format: int, /
) -> int: ...
def code(
    what: str,
    tables: tuple[Any, ...],
    start: int,
    wire: Any,
    other: Any,
    count: int,
    means: Any,
    /,
) -> None: ...
def places(arrays: Sequence[Any], writeable: bool, /) -> bytes | None: ...
