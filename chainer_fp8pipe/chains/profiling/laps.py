"""Times of calls in training, on the ranks that do them.

A call that is timed alone misses the time of Python, the graph, page faults
and cache misses: with such times, 8 stages had a balance of 0.77, and of 0.9
and more with times taken in training.  A lap is the time that this thread
computes from the end of one call to the end of the next, so that laps add up
to the whole.
"""
from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import chainer

_NOBODY: tuple[int, Any, int | None] = -1, lambda: _NOBODY, None


def clock_of(device: Any) -> Callable[[], float]:
    """Seconds of what is computed on a device.

    Args:
        device: Chainer's.  On a processor, what other processes compute on
            the same core does not count; a GPU is waited for.
    """
    gpu: Any = getattr(device, 'device', None)
    if not isinstance(device, chainer.backend.GpuDevice):
        return time.thread_time

    def now() -> float:
        gpu.synchronize()
        return time.perf_counter()
    return now


class Laps:
    """Notes the laps of calls, at the end of each.

    Args:
        device: Chainer's device of the model; a GPU is waited for.
    """

    def __init__(self, device: Any) -> None:
        self._now = clock_of(device)
        self._found: tuple[dict[int, list[float]], ...] = ({}, {})
        # Of the function with this id: its call's number, a weak reference,
        # and the index of its backward lap.
        self._numbers: dict[int, tuple[int, Any, int | None]] = {}
        self._at = 0.0

    def start(self) -> None:
        """A pass begins."""
        self._at = self._now()

    def forward(self, number: int, node: Any) -> None:
        """A call is through."""
        # Weakly: a function without a backward pass would keep the graph.
        self._numbers[id(node)] = number, weakref.ref(node), None
        self._note(0, number)

    def backward(self, node: Any) -> None:
        """A call's backward pass is through, or a part of it."""
        number, known, place = self._numbers.get(id(node), _NOBODY)
        if known() is not node:
            return
        if place is None:
            self._numbers[id(node)] = (
                number, known, len(self._found[1].get(number, ())))
            self._note(1, number)
        else:                       # the gradients of weights, put off
            now = self._now()
            self._found[1][number][place] += now - self._at
            self._at = now

    def medians(self) -> dict[int, tuple[float, float]]:
        """Seconds of each call's forward and backward pass."""
        forward, backward = self._found
        return {number: (statistics.median(laps), statistics.median(
            backward.get(number, [0.0]))) for number, laps in forward.items()}

    def _note(self, way: int, number: int) -> None:
        now = self._now()
        self._found[way].setdefault(number, []).append(now - self._at)
        self._at = now
