"""Sizes as people write them."""
from chainer_fp8pipe.planning.sizes import parse_bytes, said_bytes

import numpy
import pytest


@pytest.mark.parametrize(('text', 'expected'), [
    (None, None), (1000, 1000), (1.5e9, 1.5e9), ('7', 7), ('300 MB', 300e6),
    ('300MB', 300e6), (' 2 GiB ', 2 ** 31), ('0.5 kb', 500), ('1.5 KiB', 1536),
    ('1 tb', 1e12), ('1 TiB', 2 ** 40), ('12 B', 12)])
def test_a_size_is_a_number_of_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize('text', [
    '', 'much', 'GB', '3 XB', '-3 MB', '0', 0, -5, '1.2.3 MB', '.', '3 MB 4',
    float('nan'), True, [], '1e3'])
def test_what_is_no_size_is_named(text):
    with pytest.raises(ValueError, match='is no size; write it as in 300 MB'):
        parse_bytes(text)


@pytest.mark.parametrize(('size', 'expected'), [
    (0, '0 B'), (12, '12 B'), (999, '999 B'), (999.6, '1 kB'),
    (1000, '1 kB'), (2100, '2.1 kB'), (2148, '2.15 kB'),
    (99_960, '100 kB'), (999_600, '1 MB'), (16_340_000, '16.3 MB'),
    (400e6, '400 MB'), (2 ** 31, '2.15 GB'), (5e12, '5 TB'),
    (5e15, '5000 TB'), (numpy.int64(3000), '3 kB'),
    (numpy.float64(0.2), '0 B')])
def test_a_size_is_said_in_a_unit_that_fits(size, expected):
    assert said_bytes(size) == expected


@pytest.mark.parametrize(('size', 'expected'), [
    (0.2, '1 B'), (1000, '1 kB'), (1001, '1.01 kB'), (2_100_000, '2.1 MB'),
    (16_000_001, '16.1 MB'), (999_001, '1 MB'), (400e6, '400 MB')])
def test_what_is_needed_is_rounded_up(size, expected):
    said = said_bytes(size, up=True)
    assert said == expected
    assert parse_bytes(said) >= size
