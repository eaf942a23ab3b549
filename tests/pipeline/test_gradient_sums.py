from chainer_fp8pipe.pipeline.gradient_sums import GradientSums

import chainer
import numpy as np


def parameter(dtype='f'):
    made = chainer.Parameter(np.zeros(3, dtype))
    made.cleargrad()
    return made


def test_the_sum_has_the_bits_of_adding_one_after_the_other():
    random = np.random.RandomState(0)
    parts = [random.randn(3).astype('f') for _ in range(5)]
    weight, sums = parameter(), GradientSums()
    for part in parts:
        sums.add(weight, part)
    sums.finish(None)
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    assert weight.grad.tobytes() == expected.tobytes()


def test_the_parts_are_only_read():
    part = np.ones(3, 'f')
    sums = GradientSums()
    weight = parameter()
    for _ in range(3):
        sums.add(weight, part)
    assert part.tolist() == [1, 1, 1]


def test_every_step_starts_anew():
    weight, sums = parameter(), GradientSums()
    sums.add(weight, np.ones(3, 'f'))
    sums.finish(None)
    sums.add(weight, np.full(3, 5, 'f'))
    sums.finish(None)
    assert weight.grad.tolist() == [5, 5, 5]


def test_a_parameter_without_gradient_is_left_alone():
    used, unused, sums = parameter(), parameter(), GradientSums()
    sums.add(used, np.ones(3, 'f'))
    sums.finish(None)
    assert unused.grad is None


def test_the_loss_scale_is_noted_for_the_optimizer():
    weight, sums = parameter(), GradientSums()
    sums.add(weight, np.full(3, 8, 'f'))
    sums.finish(8.0)
    rule = chainer.optimizers.SGD(1.0).create_update_rule()
    rule.update(weight)
    assert weight.array.tolist() == [-1, -1, -1]


def test_half_precision_is_summed_in_float32():
    weight, sums = parameter(np.float16), GradientSums()
    sums.add(weight, np.full(3, 2048, np.float16))
    for _ in range(4):      # each alone is lost beside 2048 in float16
        sums.add(weight, np.full(3, 0.5, np.float16))
    sums.finish(None)
    assert weight.grad.dtype == np.float16
    assert weight.grad.tolist() == [2050, 2050, 2050]


def test_what_chainer_left_in_a_parameter_is_taken_over():
    weight, sums = parameter(), GradientSums()
    for _ in range(2):
        weight.grad = np.ones(3, 'f')
        sums.collect([weight, chainer.Parameter()])
        assert weight.grad is None
    sums.finish(None)
    assert weight.grad.tolist() == [2, 2, 2]
