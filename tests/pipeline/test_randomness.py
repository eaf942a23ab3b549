import random
import types

from chainer_fp8pipe.pipeline.randomness import Place, preserved, seed_at

import numpy as np
from chainer.backends import cuda
from hypothesis import given
from hypothesis import strategies as st

PLACES = st.builds(Place, *[st.integers(0, 2 ** 40)] * 4)


def draw(place):
    seed_at(place)
    return [*np.random.rand(4), random.random()]


def test_integers_of_numpy_seed_as_pythons():
    assert draw(Place(np.int32(3), np.int64(1), 2, np.uint8(4))) == draw(
        Place(3, 1, 2, 4))


@given(PLACES, PLACES)
def test_what_is_drawn_depends_on_the_place_alone(one, other):
    first = draw(one)
    second = draw(other)
    assert draw(one) == first
    assert (first == second) == (one == other)


class Device:
    """What is asked of CuPy: each device has one generator."""

    def __init__(self):
        self.now = self.first = np.random.RandomState(3)
        self.random = self
        self.RandomState = np.random.RandomState
        self.cuda = types.SimpleNamespace(
            Device=lambda: types.SimpleNamespace(id='of this test'))

    def get_random_state(self):
        return self.now

    def set_random_state(self, state):
        self.now = state

    def seed(self, seed):
        self.now.seed(seed)


def test_generators_go_on_as_if_nothing_was_drawn(monkeypatch):
    device = Device()
    monkeypatch.setattr(cuda, 'available', True)
    monkeypatch.setattr(cuda, 'cupy', device, raising=False)
    drawn, of_python = [], random.getstate()
    for number in 0, 0, 1:
        with preserved():
            seed_at(Place(0, number, 0, 0), device)
            drawn.append(device.now.rand())
            with preserved():
                seed_at(Place(0, 9, 9, 0), device)
                device.now.rand()
    assert drawn[0] == drawn[1] != drawn[2]
    assert device.now is device.first
    assert device.now.rand() == np.random.RandomState(3).rand()
    assert random.getstate() == of_python
