"""The fp8 paper's arithmetic, rank by rank, against ml_dtypes."""
from chainer_fp8pipe.codecs import Fp8Paper

import numpy
import pytest

from tests.formats.reference import decode, truncate
from tests.ranks import on_ranks

from .helpers import exchange, make, tensors_of


def paper(size, per_node, q):
    """Lines 15 to 26 of Algorithm 1 for all ranks at once."""
    ranks = [tensors_of(rank, [600]) for rank in range(size)]
    weight = abs(ranks[0].parameters[0]) + numpy.float32(1e-5)
    scale = numpy.float32(57344 / q / per_node)
    codes = [truncate(t.gradients[0] / weight * scale) for t in ranks]
    nodes = []
    for node in range(size // per_node):
        total = codes[node * per_node]
        for other in codes[node * per_node + 1:(node + 1) * per_node]:
            total = truncate(decode(total) + decode(other))
        nodes.append(truncate(decode(total) / (size // per_node)))
    total = nodes[0]
    for other in nodes[1:]:
        total = truncate(decode(total) + decode(other))
    return decode(total) * numpy.float32(q / 57344) * weight


@pytest.mark.parametrize('per_node', [2, 4])
@on_ranks(4)
def test_two_levels_are_algorithm_1_with_truncation(comm, per_node):
    state = Fp8Paper().init()
    result = exchange(make('mpi_op two', comm, node=per_node), state,
                      tensors_of(comm.rank, [600]))
    expected = paper(4, per_node, state.codec.report(state)['/l0'].q)
    # Only a division that rounds differently may move an element by a step.
    same = numpy.isclose(result, expected, rtol=1e-5, atol=0)
    assert same.mean() > 0.995
