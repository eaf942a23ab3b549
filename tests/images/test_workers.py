import os
import signal

from chainer_fp8pipe.images import ImageFolder
from chainer_fp8pipe.images.segment import Segment
from chainer_fp8pipe.images.worker import BatchRing, RingLayout

import numpy
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


@pytest.mark.parametrize(('workers', 'killed', 'taken', 'then'), [
    (1, [0], 0, next),      # before its first task
    (2, [1], 0, lambda iterator: stream(iterator, 100)),
    (2, [1], 1, lambda iterator: stream(iterator, 100)),
    (2, [0, 1], 1, lambda iterator: stream(iterator, 100)),
    (2, [0], 1, lambda iterator: iterator.reset()),
])
def test_killed_workers_are_named_and_the_others_ended(
        tmp_path, workers, killed, taken, then):
    iterator = ImageFolder(make_folder(tmp_path), crop()).iterator(
        4, workers, prefetch=4)
    stream(iterator, taken)
    pids = iterator.worker_pids
    assert len({pid for pid in pids if is_alive(pid)}) == workers
    for worker in killed:
        os.kill(pids[worker], signal.SIGKILL)
    assert eventually(lambda: not any(
        is_alive(pids[worker]) for worker in killed))
    with pytest.raises(RuntimeError, match='.*'.join(
            rf'worker {worker} \(process {pids[worker]}\).*SIGKILL'
            for worker in killed)):
        then(iterator)
    assert not any(map(is_alive, pids))
    assert iterator.worker_pids == []


def test_a_long_message_keeps_its_end():
    layout = RingLayout(1, 2, (3, 2, 2), numpy.dtype('u1'))
    slot = BatchRing(Segment.create(layout.total_bytes), layout)[0]
    for text in 'x' * 5000 + 'KeyError', 'ä' * 100, '':
        slot.set_message(1, text)
        assert slot.message(1).endswith(text[-8:])
    assert slot.message(0) == slot.message(1) == ''


class Here(type(crop())):
    pass


def test_a_transform_that_cannot_be_sent_is_an_error_with_the_remedy(
        tmp_path, monkeypatch):
    root = make_folder(tmp_path)
    transform = Broken()
    transform.something = lambda: None
    monkeypatch.setattr(Here, '__module__', '__main__')
    before = descriptors('pipe')
    for one, message in [(transform, 'use workers=0'),
                         (Here(8), 'defined in the main script')] * 2:
        with pytest.raises(ValueError, match=message):
            ImageFolder(root, one).iterator(4, 1)
    assert descriptors('pipe') == before
