"""What is measured of an optimizer."""
from chainer_fp8pipe.chains.measured_optimizer import measure_optimizer

import chainer


def test_frozen_parameters_are_not_updated(monkeypatch):
    updated, update = [], chainer.Parameter.update

    def recording(parameter):
        updated.append(parameter.size)
        update(parameter)
    monkeypatch.setattr(chainer.Parameter, 'update', recording)
    model = chainer.Sequential(chainer.links.Linear(40, 40),
                               chainer.links.Linear(40, 2))
    optimizer = chainer.optimizers.Adam().setup(model)
    shapes = dict(model.namedparams())
    assert measure_optimizer(optimizer, shapes, model.device)[1] == 2
    assert set(updated) == {1600, 40, 80, 2}
    updated.clear()
    model[0].disable_update()
    assert measure_optimizer(optimizer, shapes, model.device)[1] == 2
    assert set(updated) == {80, 2}
    model.disable_update()
    assert measure_optimizer(optimizer, shapes, model.device) == (0, 0, 0)
