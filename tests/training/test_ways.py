"""A network learns the same on any way over the ranks, pairs of options."""
import pytest

from tests.ranks import on_ranks

from .trainers import REPLICAS, SERIAL, Job, same_bits
from .updaters.networks import close


@pytest.mark.parametrize(('stages', 'communicator', 'settings'), [
    (1, 'float32', {}), (2, 'float32', {'schedule': 'zero_bubble'}),
    (4, 'float32', {'recompute': 'every stage'}),
    (2, 'float32', {'schedule': 'gpipe'}), (REPLICAS, 'float32', {}),
    (2, 'naive', {}), (2, 'float16', {})])
@on_ranks(4)
def test_stages_and_replicas_learn_what_one_process_learns(
        comm, stages, communicator, settings):
    job = Job(comm, 'Plain', stages, communicator=communicator, **settings)
    serial = Job(comm, 'Plain', SERIAL)
    losses, expected = ([entry['main/loss'] for entry in one.update(4)]
                        for one in (job, serial))
    share = 1e-3 if communicator == 'float16' else 2e-6
    if stages != REPLICAS:      # of which each reports its own loss
        assert losses == pytest.approx(expected, rel=share)
    close(job.values(), serial.values(), 5 * share)
    same_bits(job.values(), comm.bcast(job.values()))
    job.grid.free()
