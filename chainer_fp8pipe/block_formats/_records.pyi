from typing import Any

def encode(
    values: Any, factor: float, residual: Any, wire: Any, format: int, /
) -> int: ...
def decode(
    wire: Any, factor: float, out: Any, adds: bool, format: int, /
) -> int: ...
