from chainer_fp8pipe.mpi.once import once

from tests.ranks import on_ranks
from tests.training.updaters.networks import Plain, dataset
from tests.training.updaters.test_pipeline_updater import make_updater


@on_ranks(2)
def test_once_makes_an_object_per_communicator(comm):
    other = comm.Dup()
    made = [once(one, 'list', list) for one in (comm, comm, other)]
    assert made[0] is made[1]
    assert made[0] is not made[2]
    other.Free()


@on_ranks(2)
def test_there_can_be_more_pipelines_than_mpi_has_communicators(comm):
    for _ in range(750):
        updater = make_updater(comm, Plain, dataset(4), micro_batches=2)
    updater.update()
