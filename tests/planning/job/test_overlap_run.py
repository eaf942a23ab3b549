"""Exchanges beside passes take what arithmetic says."""
from chainer_fp8pipe.planning.cores import Cores
from chainer_fp8pipe.planning.job.job_profile import Figure

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .jobs import codecs, figures, job
from .steps import MODEL, seconds, step

some = settings(max_examples=max(settings.default.max_examples // 4, 1))


@some
@given(st.integers(1, 4), st.sampled_from([1e6, 1e7, 1e8, 1e9]),
       st.lists(st.integers(1, 20), min_size=1, max_size=8),
       st.integers(1, 8), st.sampled_from([True, 'next_forward']),
       st.sampled_from(['float32', 'fp8']), st.sampled_from([
           'direct', 'ring']))
def test_overlap_is_no_slower_than_one_after_the_other_and_hides_no_more_than_there_is(  # noqa: E501
        ranks, rate, layers, buckets, overlap, codec, algorithm):
    """Links without latency: each bucket takes its share of an exchange."""
    model = figures(*(layer * 1e-3 for layer in layers), buckets=buckets,
                    parameters=400_000, update=Figure(.005))
    profile = job(model, range(ranks), rate=rate)
    way = {'codec': codec, 'algorithm': algorithm}
    plain = step(profile, **way)
    found = seconds(profile, overlap=overlap, **way)
    wire = plain.parts['exchange']
    compute = plain.seconds.value - wire
    assert found >= max(compute, .98 * wire) * (1 - 1e-9)
    # Buckets begin and end one by one, each with a frame that waits.
    assert found <= 1.05 * plain.seconds.value + 1e-9


def test_a_wire_that_is_never_idle_is_what_a_step_takes():
    """Waiting in the next forward pass: only the first bucket's is seen."""
    model = figures(*[.01] * 20, parameters=4_000_000)
    profile = job(model, range(2), rate=2e8)
    wire = 20 * 4_000_000 / 2e8         # half of the vector twice
    assert wire == pytest.approx(.4)
    found = seconds(profile, overlap='next_forward')
    # The next pass needs the first layer's, and then the others as they come.
    assert wire < found < wire + 2 * .01 + .05 * wire
    assert found < seconds(profile, overlap=True) < wire + .2


def test_buckets_of_unequal_sizes_are_all_waited_for():
    """The last one to leave has one frame, the first one hundreds."""
    model = figures(*[.01] * 4, parameters=4_000_000)
    model.parameters['/0/W'] = model.parameters['/0/W']._replace(shape=(9,))
    profile = job(model, range(2), rate=1e7)
    for overlap in True, 'next_forward':
        assert seconds(profile, overlap=overlap) == pytest.approx(
            3 * 4_000_000 / 1e7, rel=.05)


def test_a_core_encodes_and_computes_in_turn():
    """A rank and its thread share a core: nothing is hidden of encoding."""
    profile = job(MODEL, range(2), codec=codecs(rate=2e8))
    plain = step(profile, codec='fp8')
    assert plain.parts['exchange'] > .01
    assert seconds(profile, codec='fp8', overlap=True) == pytest.approx(
        plain.seconds.value, rel=.02)
    # With a core for the thread, all but the last bucket's is hidden.
    apart = job(MODEL, (0, 0), Cores((0, 0), 1.0, (.5,)),
                codec=codecs(rate=2e8))
    assert seconds(apart, codec='fp8', overlap=True) < (
        plain.seconds.value - .6 * plain.parts['exchange'])
