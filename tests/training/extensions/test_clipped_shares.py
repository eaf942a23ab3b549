"""Counters that grow become shares."""
from chainer_fp8pipe.training.extensions.clipped_shares import ClippedShares


def test_a_share_is_of_what_was_encoded_since_the_last_look():
    shares = ClippedShares()
    assert shares.since_last('W', 5, 100) == 0.05
    assert shares.since_last('W', 15, 200) == 0.1
    assert shares.since_last('b', 1, 4) == 0.25


def test_nothing_encoded_has_no_share():
    shares = ClippedShares()
    assert shares.since_last('W', 0, 0) is None
    shares.since_last('W', 5, 100)
    assert shares.since_last('W', 5, 100) is None
