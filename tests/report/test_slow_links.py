"""Each link is compared with all others, each way by itself."""
from chainer_fp8pipe.report.diagnosis import OUT, _of_others, slow_links
from chainer_fp8pipe.report.record import LinkReading

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st


@given(st.dictionaries(
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    # Few different values, so that many links are equal; or any.
    st.tuples(*[st.integers(1, 6).map(float)
                | st.floats(1e-9, 1e9)] * 2).map(list), min_size=2))
def test_each_link_is_compared_with_all_others(speeds):
    def figure(pair):
        others = numpy.array([found for other, found in speeds.items()
                              if other != pair])
        bandwidth, latency = speeds[pair]
        fast = bandwidth / float(numpy.quantile(others[:, 0], 0.9))
        usual = float(numpy.quantile(others[:, 1], 0.1))
        late = latency > max(3 * usual, usual + 400e-6)
        return usual / latency if fast >= 0.6 and late else fast

    assert _of_others(speeds) == pytest.approx(
        {pair: figure(pair) for pair in speeds}, rel=1e-12)


def test_a_link_that_is_slow_one_way_is_named_from_its_sender():
    readings = [LinkReading(0, 1, source, target,
                            3e7 if (source, target) == (0, 9) else 1e8, 1e-4,
                            False)
                for source in range(10) for target in range(10)
                if source != target]
    found, = slow_links(readings)
    assert (found.ranks, found.way) == ((0, 9), OUT)
    assert found.figure == pytest.approx(0.3)
