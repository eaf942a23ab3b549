"""A network learns the same on any way over the ranks, pairs of options."""
import functools

import pytest

from tests.ranks import on_ranks

from .trainers import REPLICAS, SERIAL, Job, same_bits
from .updaters.networks import Tied, close

CHAIN = functools.partial(Tied, normalised=False)


@pytest.mark.parametrize(('network', 'stages', 'communicator', 'settings'), [
    ('Plain', 1, 'float32', {}),
    ('Plain', 2, 'float32', {'schedule': 'zero_bubble'}),
    ('Plain', 4, 'float32', {'recompute': True}),
    ('Plain', 2, 'float32', {'schedule': 'gpipe'}),
    ('Plain', REPLICAS, 'float32', {}), ('Plain', 2, 'naive', {}),
    ('Plain', 2, 'float16', {}), (CHAIN, 2, 'float32', {}),
    (CHAIN, REPLICAS, 'float32', {}), (CHAIN, 4, 'float32', {})])
@on_ranks(4)
def test_stages_and_replicas_learn_what_one_process_learns(
        comm, network, stages, communicator, settings):
    job = Job(comm, network, stages, communicator=communicator, **settings)
    serial = Job(comm, network, SERIAL)
    losses, expected = ([entry['main/loss'] for entry in one.update(4)]
                        for one in (job, serial))
    share = 1e-3 if communicator == 'float16' else 2e-6
    if stages != REPLICAS:      # of which each reports its own loss
        assert losses == pytest.approx(expected, rel=share)
    close(job.values(), serial.values(), 5 * share)
    same_bits(job.values(), comm.bcast(job.values()))
