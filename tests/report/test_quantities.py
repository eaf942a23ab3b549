"""Numbers have a unit that suits them."""
from chainer_fp8pipe.report import quantities

import pytest


@pytest.mark.parametrize(('value', 'text'), [
    (0, '0 s'), (2e-6, '2 µs'), (0.0123, '12.3 ms'), (1.5, '1.5 s'),
    (119, '119 s'), (3725, '1:02:05 h'), (float('nan'), 'nan'),
    (0.9999, '1 s'), (0.99996e-3, '1 ms')])
def test_seconds(value, text):
    assert quantities.seconds(value) == text


@pytest.mark.parametrize(('value', 'text'), [
    (0, '0 bytes'), (999, '999 bytes'), (1500, '1.5 kB'), (2e6, '2 MB'),
    (3.21e10, '32.1 GB'), (1.2345e12, '1230 GB'), (float('inf'), 'inf')])
def test_size(value, text):
    assert quantities.size(value) == text


@pytest.mark.parametrize(('value', 'text'), [
    (0.1234, '12.3 %'), (12.345, '1230 %')])
def test_share(value, text):
    assert quantities.share(value) == text


@pytest.mark.parametrize(('value', 'text'), [
    (0, '0'), (12.34567, '12.35'), (1234567, '1235000'), (99999, '100000'),
    (-12345678, '-12350000'), (0.00123456, '0.001235'), (1e-7, '1e-07'),
    (2e9, '2e+09'), (float('inf'), 'inf')])
def test_number_has_no_exponent_where_people_read_it(value, text):
    assert quantities.number(value) == text
