from collections.abc import Callable
from typing import Any

class Job:
    unfinished: int
    def __init__(
        self, *, python: Any, kept: Any, wire: Any, itemsize: int,
        sum_size: int, grain: int, codec: int, rounding: int, format: int,
        in_place: bool, keeps_wire: bool, shares_wire: bool,
        encodes: bool, decodes: bool, prescale: float, epsilon: float,
        shrink: float,
        tensors: Any, scales: Any, findings: Any, shares: int,
    ) -> None: ...
    def decoded(self) -> bytes: ...

class Executor:
    busy: bool
    patience: float
    def __init__(
        self, error: Callable[[int, bytes], BaseException],
        functions: tuple[int, int, int], sizes: tuple[int, int], comm: int,
        byte: int, lanes: tuple[tuple, ...], in_flight: int,
        neighbours: tuple[tuple[int, int, int, int, int], ...], memory: int,
        allocate: Callable[[int], Any], threads: int,
        beside: Executor | None,
    ) -> None: ...
    def share(
        self, job: Job, lane: int, bounds: Any, frame: int, chunks: int,
        residuals: Any, /,
    ) -> None: ...
    def let_in(self, job: Job, until: int, parts: int, /) -> None: ...
    def advance(self) -> bool: ...
    def run(self, seconds: float, brief: float, /) -> bool: ...
    def interrupt(self) -> None: ...
    def decode(self, job: Job, /) -> None: ...
    def taken(self) -> tuple[int, float, float]: ...
    def waits(self) -> list[tuple[int, int, int, int, int, int]]: ...
