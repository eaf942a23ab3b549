"""Sizes as people write them."""
from chainer_fp8pipe.planning.sizes import parse_bytes, said_bytes

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
    (0, '0 B'), (999, '999 B'), (999.6, '1.0 kB'), (2100, '2.1 kB'),
    (99_600, '100 kB'), (2_100_000, '2.1 MB'), (5e9, '5.0 GB'),
    (5e12, '5000 GB')])
def test_a_size_is_said_in_three_digits(size, expected):
    assert said_bytes(size) == expected
