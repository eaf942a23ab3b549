"""Updates range by range are those that Chainer does at once."""
import copy

from chainer_fp8pipe.exchange import blockwise_update
from chainer_fp8pipe.exchange.blockwise_update import (
    BlockwiseUpdate,
    is_elementwise,
)

import chainer
import numpy
import pytest
from chainer import optimizer_hooks, optimizers
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 60
RULES = [optimizers.AdaDelta, optimizers.AdaGrad, optimizers.Adam,
         optimizers.AMSGrad, optimizers.AdaBound, optimizers.AMSBound,
         optimizers.AdamW, optimizers.CorrectedMomentumSGD,
         optimizers.MomentumSGD, optimizers.NesterovAG, optimizers.RMSprop,
         optimizers.RMSpropGraves, optimizers.SGD]
HOOKS = [lambda: optimizer_hooks.WeightDecay(0.1),
         lambda: optimizer_hooks.Lasso(0.05),
         lambda: optimizer_hooks.GradientHardClipping(-0.5, 0.5)]


def parameter_of(kind, updates=0):
    """One with a rule of this kind, after some updates."""
    generator = numpy.random.default_rng(0)
    parameter = chainer.Parameter(
        generator.standard_normal((6, SIZE // 6), numpy.float32))
    rule = kind().create_update_rule()
    parameter.update_rule = rule
    for number in range(updates):
        parameter.grad = gradient_of(number)
        rule.update(parameter)
    parameter.grad = gradient_of(updates)
    return parameter


def gradient_of(number):
    return numpy.random.default_rng(number + 1).standard_normal(
        (6, SIZE // 6), numpy.float32)


def actions(hooks=()):
    return [*hooks, lambda rule, parameter: rule.update(parameter)]


def everything(parameter):
    rule = parameter.update_rule
    return (parameter.array.tobytes(), parameter.grad.tobytes(), rule.t,
            {name: value.tobytes() for name, value in rule.state.items()})


@pytest.mark.parametrize('kind', RULES)
@settings(max_examples=20)
@given(st.sets(st.integers(1, SIZE - 1), max_size=5), st.randoms(),
       st.integers(0, 2), st.sampled_from([(), *((hook,) for hook in HOOKS)]),
       st.sampled_from([None, 8.0]), st.integers(1, 2),
       st.sampled_from([1, 7, 25, SIZE]),
       st.sampled_from(['optimizer', 'pre', 'post']))
def test_any_ranges_in_any_order_give_the_bits_of_one_update(
        kind, cuts, order, updates, hooks, loss_scale, names, block, timing):
    """Chainer updates a parameter as often as it has names."""
    hooks = [hook() for hook in hooks]
    expected, found = parameter_of(kind, updates), parameter_of(kind, updates)
    for parameter in expected, found:
        parameter._loss_scale = loss_scale
        if timing != 'optimizer':
            for hook in hooks:
                parameter.update_rule.add_hook(hook, timing=timing)
    steps = names * actions(hooks if timing == 'optimizer' else ())
    for action in steps:
        action(expected.update_rule, expected)
    assert is_elementwise(found.update_rule, hooks)
    update = BlockwiseUpdate(found, found.update_rule, steps)
    bounds = [0, *sorted(cuts), SIZE]
    ranges = list(zip(bounds[:-1], bounds[1:], strict=True))
    order.shuffle(ranges)
    flat = found.grad.reshape(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise_update, 'BLOCK', block)
        # Whoever is interrupted begins again.
        for start, stop in ranges[len(ranges) // 2:] + ranges[1:]:
            update.update(start, stop, flat)
        update.complete()
    assert everything(found) == everything(expected)


def test_a_range_is_updated_when_it_is_there_and_only_once(monkeypatch):
    monkeypatch.setattr(blockwise_update, 'BLOCK', 10)
    parameter = parameter_of(optimizers.MomentumSGD)
    before = parameter.array.copy().reshape(-1)
    update = BlockwiseUpdate(parameter, parameter.update_rule, actions())
    flat = parameter.grad.reshape(-1)
    for number in range(2):
        assert update.update(10, 20, flat) is (number == 0)
        after = parameter.array.reshape(-1)
        changed = before - after
        assert changed[10:20] == pytest.approx(0.01 * flat[10:20], rel=1e-3)
        assert not changed[:10].any()
        assert not changed[20:].any()
    assert parameter.update_rule.t == 0     # of a whole update


def test_small_ranges_wait_for_those_beside_them(monkeypatch):
    """The way to an update takes longer than that of a few elements."""
    monkeypatch.setattr(blockwise_update, 'BLOCK', 20)
    parameter = parameter_of(optimizers.SGD)
    parts = []
    update = BlockwiseUpdate(parameter, parameter.update_rule, [
        lambda _, piece: parts.append(piece.array.copy())])
    values, flat = parameter.array.copy().reshape(-1), parameter.grad.ravel()
    for start, stop in (0, 9), (39, 50), (18, 25), (30, 39), (9, 18):
        update.update(start, stop, flat)
    assert [part.tolist() for part in parts] == [
        values[30:50].tolist(), values[:25].tolist()]
    update.update(50, 55, flat)
    update.complete()
    assert [part.tolist() for part in parts[2:]] == [
        values[25:30].tolist(), values[50:].tolist()]


def test_what_is_left_is_updated_block_by_block(monkeypatch):
    monkeypatch.setattr(blockwise_update, 'BLOCK', 7)
    expected, found = (parameter_of(optimizers.Adam) for _ in range(2))
    expected.update_rule.update(expected)
    sizes = []

    def action(rule, piece):
        sizes.append(piece.array.size)
        rule.update(piece)
    update = BlockwiseUpdate(found, found.update_rule, [action])
    update.update(10, 20, found.grad.reshape(-1))
    update.complete()
    assert sizes == [10, 7, 3, *[7] * 5, 5]
    assert everything(found) == everything(expected)


@pytest.mark.parametrize(('dtype', 'shape'), [
    ('f2', (2, 3)), ('f8', (2, 3)), ('f4', ())])
def test_what_would_be_computed_in_another_way_is_updated_at_once(
        dtype, shape):
    parameter = chainer.Parameter(numpy.ones(shape, dtype))
    parameter.grad = numpy.ones(shape, dtype)
    rule = parameter.update_rule = optimizers.SGD(
        0.5).create_update_rule()
    calls = []
    update = BlockwiseUpdate(parameter, rule, [
        lambda _, piece: calls.append(piece)])
    update.update(0, 3, parameter.grad.reshape(-1))
    assert calls == []
    update.complete()
    assert calls == [parameter]


def test_an_action_that_fails_leaves_the_rule_whole(monkeypatch):
    parameter = parameter_of(optimizers.MomentumSGD, 1)
    rule = parameter.update_rule
    state, count = copy.deepcopy(rule.state), rule.t
    monkeypatch.setattr(blockwise_update, 'BLOCK', 5)
    with pytest.raises(ZeroDivisionError):
        BlockwiseUpdate(parameter, rule, [lambda *_: 1 / 0]).update(
            0, 5, parameter.grad.reshape(-1))
    assert (rule.state['v'] == state['v']).all()
    assert rule.state['v'].shape == parameter.shape
    assert rule.t == count


def test_ranges_have_the_state_of_the_rule_that_is_asked_for_it(monkeypatch):
    """Its state is one, whatever it is divided into."""
    monkeypatch.setattr(blockwise_update, 'BLOCK', 5)
    parameter = parameter_of(optimizers.MomentumSGD, 1)
    rule = parameter.update_rule
    array, before = rule.state['v'], rule.state['v'].copy()
    update = BlockwiseUpdate(parameter, rule, actions())
    update.update(0, 5, parameter.grad.reshape(-1))
    changed = (rule.state['v'] != before).reshape(-1)
    assert changed[:5].all()
    assert not changed[5:].any()
    update.complete()
    assert rule.state['v'] is array


def test_an_empty_parameter_has_its_update_too():
    parameter = chainer.Parameter(numpy.ones((0, 3), 'f4'))
    parameter.grad = numpy.ones((0, 3), 'f4')
    rule = parameter.update_rule = optimizers.SGD().create_update_rule()
    BlockwiseUpdate(parameter, rule, actions()).complete()
    assert rule.t == 1


class Own(optimizers.sgd.SGDRule):
    """It may do what it likes, and says nothing."""


def test_only_chainers_own_elementwise_rules_and_hooks_are():
    rule = optimizers.SGD().create_update_rule()
    assert is_elementwise(rule, [])
    assert is_elementwise(rule, [hook() for hook in HOOKS])
    assert not is_elementwise(rule, [optimizer_hooks.GradientLARS()])
    assert not is_elementwise(rule, [lambda rule, parameter: None])
    assert not is_elementwise(Own(), [])
    rule.update_core = rule.update_core     # of this one alone
    assert not is_elementwise(rule, [])
    for kind in optimizers.MSVAG, optimizers.SMORMS3:
        assert not is_elementwise(kind().create_update_rule(), [])
    rule.enabled = False
    assert not is_elementwise(rule, [])


@pytest.mark.parametrize('name', ['update', 'update_core'])
def test_whoever_watches_chainers_updates_sees_them_whole(name, monkeypatch):
    rule = optimizers.SGD().create_update_rule()
    monkeypatch.setattr(chainer.UpdateRule, name, lambda *_: None)
    assert not is_elementwise(rule, [])
