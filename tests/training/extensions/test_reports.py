import json

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.training.extensions import (
    CommunicationReport,
    CompressionReport,
    Snapshot,
    resume,
)

import pytest
from chainer.training import extensions

from tests.ranks import on_ranks

from ..trainers import make_trainer


@on_ranks(2)
def test_bytes_and_times_reach_the_log(comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path, 4, warmup=9)
    trainer.extend(CommunicationReport(communicator))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport(trigger=(10, 'iteration')))
    trainer.run()
    if comm.rank == 0:
        log = json.loads((tmp_path / 'log').read_text())
        size = sum(p.size for p in
                   trainer.updater.get_optimizer('main').target.params())
        # The first update only broadcasts; nine in float32; then fp8.
        assert log[0]['comm/bytes'] == pytest.approx(4 * size, rel=0.05)
        assert size <= log[1]['comm/bytes'] <= 1.2 * size + 60
        for entry in log:
            for name in ('encode', 'exchange', 'decode'):
                assert entry[f'comm/{name}'] > 0


@on_ranks(2)
def test_q_and_clipped_share_of_every_tensor_are_recorded(comm, tmp_path):
    """A run that goes on goes on with the file."""
    for epochs, iterations in (2, [6, 8, 10]), (3, [6, 8, 10, 12, 14]):
        trainer, communicator = make_trainer(comm, tmp_path, epochs)
        trainer.extend(CompressionReport(communicator),
                       trigger=(2, 'iteration'))
        trainer.extend(Snapshot(communicator))
        if epochs == 3:
            resume(trainer, communicator, str(tmp_path))
        trainer.run()
        comm.Barrier()
        record = json.loads((tmp_path / 'compression.json').read_text())
        assert [entry['iteration'] for entry in record] == iterations
        names = {f'/predictor/{name}' for name in (
            'l1/W', 'l1/b', 'bn/gamma', 'bn/beta', 'l2/W', 'l2/b')}
        for entry in record:
            assert set(entry['tensors']) == names
            for tensor in entry['tensors'].values():
                assert tensor['q'] > 0
                assert 0 <= tensor['clipped'] <= 1
        comm.Barrier()


@on_ranks(1)
def test_communicators_of_another_kind_are_refused(comm):
    naive = create_communicator('naive', comm)
    with pytest.raises(TypeError, match='create_communicator'):
        CommunicationReport(naive)
    for other in (naive, create_communicator('float32', comm)):
        with pytest.raises(TypeError, match="'fp8'"):
            CompressionReport(other)
