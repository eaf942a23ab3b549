"""Numbers have a unit that suits them."""
from chainer_fp8pipe.report.page import quantities

import pytest


@pytest.mark.parametrize(('value', 'text'), [
    (0, '0 s'), (2e-6, '2 µs'), (0.0123, '12.3 ms'), (1.5, '1.5 s'),
    (119, '119 s'), (3725, '1:02:05 h'), (float('nan'), 'nan')])
def test_seconds(value, text):
    assert quantities.seconds(value) == text


@pytest.mark.parametrize(('value', 'text'), [
    (0, '0 bytes'), (999, '999 bytes'), (1500, '1.5 kB'), (2e6, '2 MB'),
    (3.21e10, '32.1 GB'), (float('inf'), 'inf')])
def test_size(value, text):
    assert quantities.size(value) == text


def test_share():
    assert quantities.share(0.1234) == '12.3 %'
