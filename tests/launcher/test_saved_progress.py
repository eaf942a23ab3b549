"""How far a job has come, by its snapshots."""
from chainer_fp8pipe.launcher.hosts import (
    SavedProgress,
    remove_unfinished,
    saved_progress,
)
from chainer_fp8pipe.training.snapshots import snapshot
from chainer_fp8pipe.training.snapshots.file import _UNFINISHED


def test_the_newest_snapshot_is_found_by_its_number(tmp_path):
    assert saved_progress(None) == SavedProgress()
    assert not saved_progress(str(tmp_path / 'nowhere')).is_there
    for name in (snapshot._FILENAME.format(9), snapshot._FILENAME.format(100),
                 'snapshot_iter_200', 'snapshot.partial', 'log'):
        (tmp_path / name).touch()
    found = saved_progress(str(tmp_path))
    assert found == (1, 100, str(tmp_path / 'snapshot_iter_100.npz'))
    assert found > SavedProgress()


def test_a_later_trainer_is_further_than_an_earlier_one(tmp_path):
    for trainer, update in ('', 100), ('2', 50), ('3', 1), ('x', 900):
        (tmp_path / trainer).mkdir(exist_ok=True)
        (tmp_path / trainer / f'snapshot_iter_{update}.npz').touch()
    assert saved_progress(str(tmp_path))[:2] == (3, 1)


def test_what_a_job_was_writing_is_removed_and_nothing_else(tmp_path):
    (tmp_path / '2').mkdir()
    for name in (f'{_UNFINISHED}.7.0', f'{_UNFINISHED}.7.1',
                 f'2/{_UNFINISHED}.8.0', 'log'):
        (tmp_path / name).touch()
    remove_unfinished(None)
    remove_unfinished(str(tmp_path / 'nowhere'))
    remove_unfinished(str(tmp_path))
    assert {path.name for path in tmp_path.rglob('*')} == {'2', 'log'}
