"""What fp8 and int4 leave of gradients few of whose elements matter."""
import functools
import pathlib
import sys

import pytest

from tests.ranks import on_ranks

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / 'benchmarks'))

from heavy_tails import DISTRIBUTIONS, share_and_error

#: Of int4 no more is promised: 32 elements share a scale.
OFF = {'fp8': .01, 'int4': .02, 'bfloat16': .005}


@pytest.mark.parametrize('kind', [
    kind for kind in DISTRIBUTIONS if '0,000' not in kind])
@on_ranks(4)
def test_the_mean_gradient_arrives(comm, kind):
    gradients = functools.cache(DISTRIBUTIONS[kind]())
    for name, off in OFF.items():
        share, error = share_and_error(comm, name, gradients)
        assert abs(share - 1) < off, name
        assert error < (.3 if name == 'int4' else .11), name
