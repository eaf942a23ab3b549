"""What is measured of an optimizer."""
from chainer_fp8pipe.chains.measure import optimizer_arrays

import chainer
import pytest


def test_frozen_parameters_are_not_updated(monkeypatch):
    updated, update = [], chainer.Parameter.update

    def recording(parameter):
        updated.append(parameter.size)
        update(parameter)
    monkeypatch.setattr(chainer.Parameter, 'update', recording)
    model = chainer.Sequential(chainer.links.Linear(400, 400),
                               chainer.links.Linear(400, 200))
    optimizer = chainer.optimizers.Adam().setup(model)
    shapes = dict(model.namedparams())
    kept, temporary = optimizer_arrays(optimizer, shapes, model.device)
    assert kept == 2
    assert temporary == pytest.approx(2, abs=1.1)
    assert set(updated) == {160000}
    updated.clear()
    model[0].disable_update()
    assert optimizer_arrays(optimizer, shapes, model.device)[0] == 2
    assert set(updated) == {80000}
    model.disable_update()
    assert optimizer_arrays(optimizer, shapes, model.device) == (0, 0)
