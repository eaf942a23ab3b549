from chainer_fp8pipe.exchange.drift import contents_of, digest

import chainer
import chainer.links as L
import numpy
import pytest


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
