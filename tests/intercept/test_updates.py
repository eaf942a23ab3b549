"""Optimizers ask, while there is somebody to ask, and update otherwise."""
import contextlib
import threading

from chainer_fp8pipe.intercept.updates import ask_first, ask_no_more

import chainer
import chainer.links as L
import numpy
import pytest

ORIGINAL = chainer.GradientMethod.update


@contextlib.contextmanager
def asking(answer=False):
    """The optimizers that ask in a block."""
    asked = []

    def takes_over(optimizer):
        asked.append(optimizer)
        return answer
    ask_first(takes_over)
    try:
        yield asked
    finally:
        ask_no_more(takes_over)


@pytest.fixture
def optimizer():
    """One whose update adds one to each element."""
    model = L.Linear(2, 2, initialW=0)
    for parameter in model.params():
        parameter.grad = -numpy.ones_like(parameter.array)
    return chainer.optimizers.SGD(1.0).setup(model)


def updates_of(optimizer):
    return optimizer.target.W.array[0, 0]


@pytest.mark.parametrize(('answer', 'updates'), [(False, 1), (True, 0)])
def test_an_update_takes_place_unless_it_is_taken_over(
        optimizer, answer, updates):
    with asking(answer) as asked:
        optimizer.update()
    assert asked == [optimizer]
    assert updates_of(optimizer) == updates
    assert optimizer.t == updates
    optimizer.update()
    assert asked == [optimizer]
    assert updates_of(optimizer) == updates + 1


def test_an_update_with_a_loss_function_asks_nobody(optimizer):
    def loss():
        return -chainer.functions.sum(optimizer.target.W)
    with asking(True) as asked:
        optimizer.update(loss)
    assert asked == []
    assert updates_of(optimizer) == 1


def test_who_comes_first_is_asked_first(optimizer):
    with asking() as first, asking(True) as second, asking() as third:
        optimizer.update()
    assert (first, second, third) == ([optimizer], [optimizer], [])


def test_who_comes_twice_is_asked_once_until_gone_twice(optimizer):
    asked = []
    for change, times in ((ask_first, 1), (ask_first, 1), (ask_no_more, 1),
                          (ask_no_more, 0)):
        change(asked.append)
        asked.clear()
        optimizer.update()
        assert len(asked) == times
    with pytest.raises(ValueError, match='not in list'):
        ask_no_more(asked.append)
    assert chainer.GradientMethod.update is ORIGINAL


def test_threads_come_and_go_while_another_updates(optimizer):
    stop = threading.Event()

    def run():
        while not stop.is_set():
            with asking():
                pass
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(500):
        optimizer.update()
    stop.set()
    for thread in threads:
        thread.join()
    assert updates_of(optimizer) == 500
    assert chainer.GradientMethod.update is ORIGINAL
