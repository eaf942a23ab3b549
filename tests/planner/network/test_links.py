import contextlib
import dataclasses
import functools
import math
from unittest import mock

from chainer_fp8pipe.planner.network import links
from chainer_fp8pipe.planning.job.job_profile import Figure, NetworkFigures

import pytest

from tests.ranks import on_ranks

LITTLE = 0.5            # seconds
#: Ranks that share cores with other programs may be late.
measure_network = functools.partial(links.measure_network, patience=300.0)


@contextlib.contextmanager
def hosts(*numbers):
    """As if ranks were on these hosts."""
    with mock.patch.object(links, 'nodes_of', return_value=list(numbers)):
        yield


def check(comm, figures, *positive):
    """These figures are positive numbers, and all the same on all ranks."""
    for name in positive:
        assert 0 < getattr(figures, name).value < math.inf, name
    given = {field.name: getattr(figures, field.name)
             for field in dataclasses.fields(figures)}
    assert all(isinstance(value, (Figure, tuple, float, type(None)))
               for value in given.values())
    assert figures.burst >= 0
    assert figures.byte_cost.value >= 0
    assert set(map(repr, comm.allgather(figures))) == {repr(figures)}
    figures.cluster()       # which the engine takes


@on_ranks(1)
def test_one_rank_has_nothing_to_measure(comm):
    assert measure_network(comm) == NetworkFigures((0,))


@on_ranks(2, 4, 5)
def test_ranks_of_one_host_have_local_figures_only(comm):
    with hosts(*[0] * comm.size):
        figures = measure_network(comm, LITTLE)
    check(comm, figures, 'local_latency', 'local_rate', 'message_cost')
    assert figures.hosts == (0,) * comm.size
    assert not figures.between_hosts
    assert figures.rate == Figure(math.inf)
    assert figures.trunk is None


@on_ranks(2, 4, 5)
def test_hosts_of_one_rank_have_no_local_figures(comm):
    with hosts(*range(comm.size)):
        figures = measure_network(comm, LITTLE)
    check(comm, figures, 'latency', 'rate', 'message_cost')
    assert figures.hosts == tuple(range(comm.size))
    assert figures.local_rate == Figure(math.inf)


@pytest.mark.parametrize('numbers', [(0, 1, 1, 0, 2), (0, 0, 1, 1, 1)])
@on_ranks(5)
def test_uneven_hosts_have_all_figures(comm, numbers):
    with hosts(*numbers):
        figures = measure_network(comm, LITTLE)
    check(comm, figures, 'latency', 'rate', 'local_latency', 'local_rate',
          'message_cost')
    assert figures.hosts == numbers


@on_ranks(4)
def test_links_of_a_torus_are_measured(comm):
    with hosts(*range(4)):
        figures = measure_network(comm, LITTLE, torus=(2, 2))
    check(comm, figures, 'latency', 'rate', 'message_cost')
    assert figures.torus == (2, 2)
    assert figures.trunk is None


@on_ranks(4)
def test_a_torus_that_does_not_fit_the_hosts_is_refused_on_all_ranks(comm):
    with hosts(0, 0, 1, 1), pytest.raises(
            ValueError, match=r'torus=\(2, 2\) is no torus of 2 hosts'):
        measure_network(comm, LITTLE, torus=(2, 2))
    with pytest.raises(ValueError, match='more than 0'):
        measure_network(comm, 0.0)


@on_ranks(2, 3)
def test_all_ranks_must_ask_for_the_same(comm):
    with pytest.raises(ValueError, match='budget is 1.0 on rank 0 but 2.0 on '
                                         'rank 1'):
        measure_network(comm, 2.0 if comm.rank == 1 else 1.0)


@on_ranks(2)
def test_a_rank_that_does_not_measure_is_named_instead_of_a_hang(comm):
    if comm.rank == 1:
        with pytest.raises(RuntimeError,
                           match='rank 1 has waited .* of rank 0: check'):
            measure_network(comm, LITTLE, patience=0.5)


@on_ranks(2)
def test_an_error_while_measuring_is_raised_on_all_ranks(comm):
    def fail(*arguments):
        if comm.rank == 1:
            raise MemoryError('no memory for frames')
        return measure(*arguments)
    measure = links.LinkSurvey.rates
    with (mock.patch.object(links.LinkSurvey, 'rates', fail),
          pytest.raises(RuntimeError, match='rank 1 failed: MemoryError')):
        measure_network(comm, LITTLE)
