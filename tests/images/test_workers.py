import os
import signal

from chainer_fp8pipe.images import ImageFolder

import pytest

from .folders import Broken, crop, make_folder, stream
from .processes import descriptors, eventually, is_alive

# Workers have this in their environment, and ranks do not.
FAILING = """
import os
if 'PYTHONSAFEPATH' in os.environ:
    raise ImportError('no such library here')
from chainer_fp8pipe.images import RandomResizedCrop
class OwnCrop(RandomResizedCrop):
    pass
"""


def test_a_transform_that_workers_cannot_import_ends_them_and_is_an_error(
        tmp_path, monkeypatch, capfd):
    monkeypatch.delenv('PYTHONSAFEPATH', raising=False)
    (tmp_path / 'own_crop.py').write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_crop  # type: ignore
    root = make_folder(tmp_path / 'root')
    iterator = ImageFolder(root, own_crop.OwnCrop(8)).iterator(4, workers=2)
    with pytest.raises(RuntimeError, match=(
            r'worker [01] .* ended with exit code 1; its own message is '
            r'above; .*with workers=0')):
        next(iterator)
    assert 'no such library here' in capfd.readouterr().err


def test_a_single_worker_that_is_killed_before_its_first_task_is_named(
        tmp_path):
    iterator = ImageFolder(make_folder(tmp_path), crop()).iterator(
        4, workers=1)
    pid, = iterator.worker_pids
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not is_alive(pid))
    with pytest.raises(RuntimeError, match=(
            rf'worker 0 \(process {pid}\) .* was killed by SIGKILL')):
        next(iterator)


def test_workers_that_are_killed_together_are_all_named(tmp_path):
    iterator = ImageFolder(make_folder(tmp_path), crop()).iterator(
        4, workers=2, prefetch=2)
    next(iterator)
    pids = iterator.worker_pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not any(map(is_alive, pids)))
    with pytest.raises(RuntimeError, match=(
            rf'process {pids[0]}\).*SIGKILL.*process {pids[1]}\).*SIGKILL')):
        stream(iterator, 10)


def test_an_iterator_that_is_refused_leaves_no_file_open(tmp_path):
    transform = Broken()
    transform.something = lambda: None      # cannot be pickled
    data = ImageFolder(make_folder(tmp_path), transform)

    before = descriptors('pipe')
    for _ in range(2):
        with pytest.raises(ValueError, match='use workers=0'):
            data.iterator(4, workers=1)
    assert descriptors('pipe') == before
