"""What is said to be final is what Chainer leaves in the parameters."""
import contextlib
import threading

import chainer_fp8pipe
from chainer_fp8pipe.intercept.ready_gradients import PATCHES

import chainer
import chainermn
import numpy
import pytest

from tests.communicators.networks import NETWORKS

assert chainer_fp8pipe


class Communicator:
    """Watches the models of an optimizer, and has no other ranks."""

    def __init__(self, wanted=True):
        self.wanted = wanted
        self.passes, self.finals, self.ends = [], [], 0

    def watcher(self, model):
        self.model = model
        return self if self.wanted else None

    def parameters(self):
        return {name: parameter for name, parameter
                in self.model.namedparams() if parameter.array is not None}

    def begin(self, names, loss_scale):
        self.passes.append((names, loss_scale))

    def final(self, name, gradient):
        self.finals.append((name, gradient))

    def end(self):
        self.ends += 1

    def multi_node_mean_grad(self, model, zero_fill=True):
        pass

    bcast_data = multi_node_mean_grad


def updating(model, communicator, loss, zero_grads=False):
    """Has an optimizer make an update that leaves gradients as they are."""
    optimizer = chainer.optimizers.SGD(0.0)
    optimizer.loss_scaling(scale=2.0)
    if zero_grads:
        optimizer.use_cleargrads(False)
    optimizer = chainermn.create_multi_node_optimizer(
        optimizer, communicator).setup(model)
    with contextlib.ExitStack() as held:
        for patch in PATCHES:
            held.enter_context(patch)
        optimizer.update(loss)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.namedparams()
            if parameter.grad is not None}


@pytest.mark.parametrize('name', NETWORKS)
@pytest.mark.parametrize('zero_grads', [False, True])
def test_what_is_final_is_what_chainer_leaves(name, zero_grads):
    def train(communicator):
        numpy.random.seed(1)
        model = NETWORKS[name]()
        model.loss(0)           # shapes that come late
        numpy.random.seed(0)
        updating(model, communicator, lambda: model.loss(3), zero_grads)
        return gradients(model)
    plain, communicator = train(Communicator(False)), Communicator()
    found = train(communicator)
    assert found.keys() == plain.keys()
    for key, gradient in plain.items():
        assert gradient.tobytes() == found[key].tobytes()
    assert [scale for _, scale in communicator.passes] == [2.0]
    assert communicator.ends == 1
    last = dict(communicator.finals)
    if name == 'Forgetful':         # a pass inside of another
        assert set(last) == {'/outer/W', '/outer/b'}
    for key, gradient in last.items():
        assert gradient is found[key]
    if name in ('Plain', 'Shared', 'Penalty'):
        assert {*map(id, last.values())} == {*map(id, found.values())}


def test_passes_beside_the_updates_own_are_not_told():
    """Before it, in its loss, in another thread, and after an error."""
    model, communicator = NETWORKS['Plain'](), Communicator()

    def loss():
        model.loss(1).backward()
        thread = threading.Thread(target=lambda: model.loss(2).backward())
        thread.start()
        thread.join()
        return model.loss(0)

    def fail():
        raise KeyError('here')
    with pytest.raises(KeyError):
        updating(model, communicator, fail)
    assert (communicator.passes, communicator.ends) == ([], 1)
    model.loss(3).backward()
    updating(model, communicator, loss)
    assert len(communicator.passes) == 1
    assert dict(communicator.finals) == gradients(model)
