"""Random numbers that do not depend on how a model was cut.

A layer draws from generators seeded by its place: seed, iteration, layer of
the whole model, first sample of the micro-batch.  So a dropout mask is the
same on every rank, in every order, and when a pass is made again.
"""
from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
from chainer.backends import cuda


class Place(NamedTuple):
    """Where in the training a layer runs."""

    seed: int               # of the whole run
    iteration: int          # number of the update
    layer: int              # index in the whole model
    first_sample: int       # of the micro-batch, in the batch of all replicas


def seed_at(place: Place, xp: Any = numpy) -> None:
    """Makes the random numbers that follow depend on ``place`` alone.

    Seeds the global generators of NumPy, CuPy and Python, which it does not
    restore: put :func:`preserved` around the whole step.
    """
    # Two words of 32 bits for each number, the low one first.
    numpy.random.seed([int(number) >> shift & 0xffffffff
                       for number in place for shift in (0, 32)])
    random.seed(repr([int(number) for number in place]))
    if xp is not numpy:
        xp.random.seed(int(numpy.random.randint(1 << 31)))


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Gives the global generators of NumPy, CuPy and Python their states back.

    That of CuPy, which tells no state, waits, and another one draws.
    """
    state, of_python = numpy.random.get_state(), random.getstate()
    device = cuda.cupy.random if cuda.available else None
    if device is not None:
        before = device.get_random_state()
        device.set_random_state(_device_state(cuda.cupy.cuda.Device().id))
    try:
        yield
    finally:
        numpy.random.set_state(state)
        random.setstate(of_python)
        if device is not None:
            device.set_random_state(before)


@functools.lru_cache(None)
def _device_state(device: int) -> Any:
    """The generator that draws on a device in blocks of :func:`preserved`."""
    return cuda.cupy.random.RandomState(0)
