"""What is measured of an optimizer."""
from chainer_fp8pipe.chains.measured_optimizer import measure_optimizer

import chainer


def test_frozen_parameters_are_not_updated():
    updated = []

    class Recording(chainer.optimizers.Adam):
        def update(self, *args, **kwargs):
            updated.append(sum(one.size for one in self.target.params()))
            super().update(*args, **kwargs)
    model = chainer.Sequential(chainer.links.Linear(40, 40),
                               chainer.links.Linear(40, 2))
    optimizer = Recording().setup(model)
    shapes = dict(model.namedparams())
    assert measure_optimizer(optimizer, shapes, model.device)[1] == 2
    model[0].disable_update()
    assert measure_optimizer(optimizer, shapes, model.device)[1] == 2
    assert sorted(set(updated)) == [82, 1722]
    model.disable_update()
    assert measure_optimizer(optimizer, shapes, model.device) == (0, 0, 0)
