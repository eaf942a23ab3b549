from chainer_fp8pipe.exchange.buckets import LastBackward


def last(passes, kinds, models=1):
    """Which passes of one interval it takes for the last."""
    found = [passes.begin(kind, models) for kind in kinds]
    passes.averaged()
    return found


def learnt(*kinds):
    passes = LastBackward()
    for interval in kinds:
        last(passes, interval)
    return passes


def test_one_pass_is_the_last_once_a_whole_interval_was_seen():
    passes = LastBackward()
    assert [last(passes, 'a') for _ in range(4)] == [
        [False], [False], [True], [True]]


def test_of_passes_that_add_up_only_the_last_counts():
    passes = learnt('aaa', 'aaa')
    assert last(passes, 'aaa') == [False, False, True]


def test_fewer_passes_than_ever_are_not_taken_for_all():
    passes = learnt('a', 'aaa')
    assert last(passes, 'a') == [False]
    assert last(passes, 'aaa') == [False, False, True]


def test_passes_of_another_kind_do_not_count():
    passes = learnt('gd', 'gd')     # a generator's goes through both
    assert last(passes, 'gd') == [False, True]
    assert last(passes, 'd') == [True]
    assert last(passes, 'ggd') == [False, False, True]


def test_a_new_model_makes_it_learn_again():
    passes = learnt('a', 'a')
    assert last(passes, 'a', models=2) == [False]
    assert last(passes, 'a', models=2) == [False]
    assert last(passes, 'a', models=2) == [True]


def test_an_interval_without_a_pass_teaches_nothing():
    passes = learnt('a', 'a', '')
    assert last(passes, 'a') == [True]
