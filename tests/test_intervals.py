"""Intervals as people write them."""
from chainer_fp8pipe.command_line import Interval, parse_interval

import pytest


@pytest.mark.parametrize(('text', 'interval'), [
    ('30s', Interval(30, 'second')), ('5m', Interval(300, 'second')),
    ('1.5 h', Interval(5400, 'second')),
    ('100 iterations', Interval(100, 'iteration')),
    ('1 iteration', Interval(1, 'iteration')),
    ('7updates', Interval(7, 'iteration')),
    ('1 epoch', Interval(1, 'epoch')), ('0.5 epochs', Interval(.5, 'epoch')),
])
def test_an_interval_is_read(text, interval):
    assert parse_interval(text) == interval


@pytest.mark.parametrize('text', [
    '', '5', 'm', '0s', '-1s', '5 days', '1.5 iterations', '5m 3s', '1e3s'])
def test_what_is_no_interval_is_named(text):
    with pytest.raises(ValueError, match='is no interval; write it as in'):
        parse_interval(text)
