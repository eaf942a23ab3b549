import string

from chainer_fp8pipe.communicators.buckets import divide

from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = st.text(string.ascii_lowercase + string.digits + '/', min_size=1,
                max_size=6)


def test_the_last_layers_come_first_as_people_count():
    sizes = dict.fromkeys(
        ['/l1/W', '/l10/W', '/l2/W', '/l1/b', '/a/2/W', '/a/11/W'], 1)
    assert divide(sizes, 0) == ((
        '/l10/W', '/l2/W', '/l1/b', '/l1/W', '/a/11/W', '/a/2/W'),)


def test_buckets_are_filled_up_to_the_limit():
    sizes = {'/1': 10, '/2': 5, '/3': 5, '/4': 100, '/5': 1, '/6': 1}
    assert divide(sizes, 40) == (('/6', '/5'), ('/4',), ('/3', '/2'), ('/1',))


def test_without_parameters_there_is_no_bucket():
    assert divide({}, 100) == ()


@given(st.dictionaries(NAMES, st.integers(1, 50)), st.integers(0, 200))
@settings(deadline=None)
def test_every_parameter_is_in_one_bucket_and_only_single_ones_are_larger(
        sizes, limit):
    buckets = divide(sizes, limit)
    assert sorted(name for names in buckets for name in names) == sorted(
        sizes)
    if limit:
        for names in buckets:
            assert len(names) == 1 or 4 * sum(
                sizes[name] for name in names) <= limit
    # The insertion order is one rank's own business.
    assert divide(dict(reversed(sizes.items())), limit) == buckets
