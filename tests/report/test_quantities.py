"""Numbers have a unit that suits them."""
from chainer_fp8pipe.report import quantities

import numpy
import pytest


@pytest.mark.parametrize(('say', 'value', 'text'), [
    *((quantities.seconds, value, text) for value, text in (
        (0, '0 s'), (2e-6, '2 µs'), (0.0123, '12.3 ms'), (1.5, '1.5 s'),
        (99.4, '99.4 s'), (99.6, '1 min 40 s'), (3725, '1 h 2 min'),
        (0.9999, '1 s'), (0.99996e-3, '1 ms'))),
    *((quantities.size, value, text) for value, text in (
        (0, '0 B'), (12, '12 B'), (999, '999 B'), (999.6, '1 kB'),
        (1000, '1 kB'), (2148, '2.15 kB'), (99_960, '100 kB'),
        (999_600, '1 MB'), (16_340_000, '16.3 MB'), (2 ** 31, '2.15 GB'),
        (5e12, '5 TB'), (5e15, '5000 TB'), (numpy.int64(3000), '3 kB'),
        (numpy.float64(0.2), '0 B'), (float('inf'), 'inf'))),
    (quantities.share, 0.1234, '12.3 %'), (quantities.share, 12.345,
                                           '1230 %'),
    *((quantities.number, value, text) for value, text in (
        (0, '0'), (12.34567, '12.35'), (1234567, '1235000'),
        (99999, '100000'), (-12345678, '-12350000'),
        (0.00123456, '0.001235'), (1e-7, '1e-07'), (2e9, '2e+09'),
        (float('inf'), 'inf')))])
def test_a_quantity_is_said_as_people_read_it(say, value, text):
    assert say(value) == text


@pytest.mark.parametrize(('size', 'expected'), [
    (0.2, '1 B'), (1000, '1 kB'), (1001, '1.01 kB'), (2_100_000, '2.1 MB'),
    (16_000_001, '16.1 MB'), (999_001, '1 MB'), (400e6, '400 MB')])
def test_what_is_needed_is_rounded_up(size, expected):
    said = quantities.size(size, up=True)
    assert said == expected
    assert quantities.parse_bytes(said) >= size


@pytest.mark.parametrize(('text', 'expected'), [
    (None, None), (1000, 1000), (1.5e9, 1.5e9), ('7', 7), ('300 MB', 300e6),
    ('300MB', 300e6), (' 2 GiB ', 2 ** 31), ('0.5 kb', 500), ('1.5 KiB', 1536),
    ('1 tb', 1e12), ('1 TiB', 2 ** 40), ('12 B', 12), ('1e3 kB', 1e6)])
def test_a_size_is_a_number_of_bytes(text, expected):
    assert quantities.parse_bytes(text) == expected


@pytest.mark.parametrize('text', [
    '', 'much', 'GB', '3 XB', '-3 MB', '0', 0, -5, '1.2.3 MB', '.', '3 MB 4',
    float('nan'), True, [], '1e999', '1e'])
def test_what_is_no_size_is_named(text):
    with pytest.raises(ValueError, match='is no size; write it as in 300 MB'):
        quantities.parse_bytes(text)


@pytest.mark.parametrize(('read', 'text', 'expected'), [
    (quantities.parse_bytes, '2G', 2e9), (quantities.parse_bytes, '150gb',
                                          150e9),
    (quantities.parse_rate, '100mbit', 1e8),
    (quantities.parse_rate, '1 Gbit/s', 1e9),
    (quantities.parse_rate, '2.5 Gbps', 2.5e9),
    (quantities.parse_rate, '100', None), (quantities.parse_rate, '1GB', None),
    (quantities.parse_rate, '0mbit', None),
    (quantities.parse_count, '64k', 64_000),
    (quantities.parse_count, '0.4', None),
    (quantities.parse_count, '8MB', None),
    (quantities.parse_seconds, '0.5 s', 0.5),
    (quantities.parse_seconds, '5m', None),
    (quantities.parse_seconds, 'inf', None)])
def test_units_are_read_alike_and_a_rate_needs_one(read, text, expected):
    if expected is not None:
        assert read(text) == expected
        return
    with pytest.raises(ValueError, match=f'^{text!r} is no '):
        read(text)
