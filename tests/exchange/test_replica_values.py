from chainer_fp8pipe.exchange.replica_values import (
    contents_of,
    digest,
    replace,
)

import chainer
import chainer.links as L
import numpy
import pytest


def updated(value=1.0):
    """A parameter after an update with Adam."""
    parameter = chainer.Parameter(numpy.full((2, 3), value, 'f4'))
    parameter.update_rule = chainer.optimizers.Adam().create_update_rule()
    parameter.grad = numpy.full((2, 3), value, 'f4')
    parameter.update()
    return parameter


def as_numbers(parameter):
    return {part: digest(value)
            for part, value in contents_of(parameter).items()}


@pytest.mark.parametrize('value', [
    numpy.arange(6, dtype='f4').reshape(2, 3), numpy.array(1.5),
    numpy.zeros((0, 3), 'f4'), numpy.arange(6, dtype='f2'), 3, 'word'])
def test_a_digest_is_that_of_equal_contents_alone(value):
    same = numpy.array(value) if isinstance(value, numpy.ndarray) else value
    assert digest(value) == digest(same)
    assert 0 <= digest(value) < 1 << 64
    others = [numpy.arange(6, dtype='f4').reshape(3, 2),
              numpy.zeros((0, 2), 'f4'), numpy.array(1.25), 4, 'words']
    assert digest(value) not in map(digest, others)


def test_every_bit_counts():
    array = numpy.zeros(1000, 'f4')
    found = {digest(array)}
    for place in range(0, 32000, 997):
        bits = array.copy()
        bits.view(numpy.uint32)[place // 32] ^= 1 << place % 32
        found.add(digest(bits))
    assert len(found) == 1 + len(range(0, 32000, 997))


def test_order_in_memory_does_not_count_and_read_only_is_no_matter():
    array = numpy.arange(6, dtype='f4').reshape(2, 3)
    other = numpy.asfortranarray(array)
    other.flags.writeable = False
    assert digest(array) == digest(other)


def test_what_is_not_there_is_left_out():
    lazy = L.Linear(None, 2)
    assert contents_of(lazy.W) == {}
    chainer.optimizers.MomentumSGD().setup(lazy)
    assert list(contents_of(lazy.W).values()) == [0]
    assert list(contents_of(lazy.b)) == ['the value', 'the count of updates']


def test_contents_are_replaced_where_they_are():
    wanted, parameter = updated(2.0), updated()
    array, state = parameter.array, parameter.update_rule.state['m']
    replace(parameter, contents_of(wanted))
    assert as_numbers(parameter) == as_numbers(wanted)
    assert parameter.array is array
    assert parameter.update_rule.state['m'] is state


def test_a_state_that_is_missing_is_made_and_one_too_many_is_dropped():
    wanted, fresh = updated(), chainer.Parameter(numpy.zeros((2, 3), 'f4'))
    fresh.update_rule = chainer.optimizers.Adam().create_update_rule()
    before = as_numbers(fresh)
    copied = {part: numpy.array(value) if hasattr(value, 'shape') else value
              for part, value in contents_of(fresh).items()}
    replace(fresh, contents_of(wanted))
    assert as_numbers(fresh) == as_numbers(wanted)
    replace(fresh, copied)
    assert as_numbers(fresh) == before


def test_states_of_unknown_kinds_are_left_alone():
    parameter, own = updated(), object()
    parameter.update_rule.state['own'] = own
    replace(parameter, contents_of(updated(2.0)))
    assert parameter.update_rule.state['own'] is own
    assert as_numbers(parameter) == as_numbers(updated(2.0))
