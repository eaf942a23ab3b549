from collections.abc import Sequence
from typing import Any

def encode(values: Any, codes: Any, rounding: int, /) -> None: ...
def decode(codes: Any, out: Any, /) -> None: ...
def add(codes: Any, sums: Any, rounding: int, /) -> None: ...
def largest(
    gradient: Any, parameter: Any, epsilon: float, /
) -> tuple[float, float]: ...
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
