"""Only the latest values are kept."""
from chainer_fp8pipe.chains.recent import Recent


def test_what_was_not_asked_for_the_longest_is_forgotten():
    recent = Recent(2)
    recent['one'], recent['two'] = 1, 2
    assert recent.get('one') == 1
    recent['three'] = 3
    assert [recent.get(key) for key in ('one', 'two', 'three')] == [
        1, None, 3]
    assert len(recent) == 2
