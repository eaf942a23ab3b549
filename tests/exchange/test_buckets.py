import string

from chainer_fp8pipe.exchange.buckets import divide

from hypothesis import given
from hypothesis import strategies as st

NAMES = st.text(string.ascii_lowercase + string.digits + '/', min_size=1,
                max_size=6)


def test_the_last_layers_come_first_as_people_count():
    sizes = dict.fromkeys(
        ['/l1/W', '/l10/W', '/l2/W', '/l1/b', '/a/2/W', '/a/11/W'], 1)
    assert divide(sizes, 0) == ((
        '/l10/W', '/l2/W', '/l1/W', '/l1/b', '/a/11/W', '/a/2/W'),)


def test_buckets_are_filled_with_layers_up_to_the_limit():
    sizes = {'/1/W': 10, '/2/W': 4, '/2/b': 1, '/3/W': 5, '/5/W': 1,
             '/6/W': 1}
    assert divide(sizes, 40) == (
        ('/6/W', '/5/W', '/3/W'), ('/2/W', '/2/b'), ('/1/W',))


def test_what_is_small_goes_with_the_rest_of_its_layer():
    """So that no bucket waits for the layer below."""
    sizes = {'/1/W': 98, '/1/b': 6, '/2/W': 1000, '/2/b': 6, '/3/W': 200,
             '/3/U': 90, '/3/b': 9}
    assert divide(sizes, 400) == (
        ('/3/W',), ('/3/U', '/3/b'), ('/2/W', '/2/b'), ('/1/W', '/1/b'))


def test_a_small_layer_goes_with_the_large_one_below():
    sizes = {'/0/W': 300, '/1/W': 500, '/1/b': 2, '/2/W': 3, '/2/b': 1,
             '/3/W': 250, '/4/W': 3, '/5/W': 2}
    assert divide(sizes, 400) == (
        ('/5/W', '/4/W', '/3/W'), ('/2/W', '/2/b', '/1/W', '/1/b'),
        ('/0/W',))


def test_without_parameters_there_is_no_bucket():
    assert divide({}, 100) == ()


def test_a_layer_with_layers_in_it_is_one_all_the_same():
    sizes = {'/1/W': 10, '/1/conv/W': 10, '/1/z': 10}
    assert divide(sizes, 80) == (('/1/conv/W',), ('/1/W', '/1/z'))


@given(st.dictionaries(NAMES, st.integers(1, 50)), st.integers(0, 200))
def test_every_parameter_is_in_one_bucket_and_none_is_much_too_large(
        sizes, limit):
    buckets = divide(sizes, limit)
    assert sorted(name for names in buckets for name in names) == sorted(
        sizes)
    if limit:
        for names in buckets:
            large, *small = sorted((4 * sizes[name] for name in names),
                                   reverse=True)
            assert sum(small) <= max(limit - large, 0) + limit // 16
    else:
        assert len(buckets) <= 1
    # The insertion order is one rank's own business.
    assert divide(dict(reversed(sizes.items())), limit) == buckets
