import copy
import pickle
import types

from chainer_fp8pipe.images import ImageFolder, batch_arrays

import chainer
import numpy
import pytest

from .folders import crop, make_folder


@pytest.fixture
def batch(tmp_path):
    data = ImageFolder(make_folder(tmp_path), crop())
    return next(data.iterator(5, workers=0))


def test_chainers_converter_makes_the_same_arrays(batch):
    images, labels = chainer.dataset.concat_examples(batch)
    assert (images == batch.images).all()
    assert (labels == batch.labels).all()
    assert labels.dtype == numpy.int32


@pytest.mark.parametrize('device', [None, -1, '@numpy'])
def test_on_the_cpu_nothing_is_copied(batch, device):
    images, labels = batch_arrays(batch, device)
    assert images is batch.images
    assert labels is batch.labels


def test_a_batch_is_pickled_and_copied_as_the_list_that_it_is(batch):
    for found in pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch):
        assert type(found) is list
        images, labels = chainer.dataset.concat_examples(found)
        assert (images == batch.images).all()
        assert (labels == batch.labels).all()


def test_other_batches_are_left_to_chainer(batch):
    images, labels = batch_arrays(list(batch), -1)
    assert (images == batch.images).all()
    assert images is not batch.images
    assert (labels == batch.labels).all()


class FakeRuntime:
    """What of CUDA's runtime is called."""

    CUDARuntimeError = RuntimeError

    def __init__(self):
        self.registered = {}
        self.calls = []

    def hostRegister(self, address, size, flags):   # noqa: N802
        assert address not in self.registered
        self.registered[address] = size
        self.calls.append('register')

    def hostUnregister(self, address):              # noqa: N802
        del self.registered[address]
        self.calls.append('unregister')


class FakeArray:
    def __init__(self, cupy, shape, dtype):
        self._cupy = cupy
        self.content = numpy.zeros(shape, dtype)

    def set(self, array):
        """The copy is not made before the stream is waited for."""
        self._cupy.pending.append((self.content, array))


class FakeDevice:
    """A GPU's: everything is done on the host."""

    def __init__(self):
        self.runtime = FakeRuntime()
        self.pending = []
        self.inside = False
        self.device = self
        stream = types.SimpleNamespace(synchronize=self._synchronize)
        self.xp = types.SimpleNamespace(
            cuda=types.SimpleNamespace(
                runtime=self.runtime, get_current_stream=lambda: stream),
            empty=lambda shape, dtype: FakeArray(self, shape, dtype))

    def __enter__(self):
        self.inside = True

    def __exit__(self, *_):
        self.inside = False

    def _synchronize(self):
        assert self.inside
        for content, array in self.pending:
            content[...] = array
        self.pending.clear()


def covers(runtime, array):
    return any(start <= array.ctypes.data
               and array.ctypes.data + array.nbytes <= start + size
               for start, size in runtime.registered.items())


def test_to_a_gpu_images_go_from_memory_that_is_pinned_once(tmp_path):
    data = ImageFolder(make_folder(tmp_path), crop())
    iterator, device = data.iterator(5, workers=0), FakeDevice()
    for _ in range(4):
        batch = next(iterator)
        sent = batch.memory.send(batch.images, device)
        # Workers may write there as soon as it has returned.
        assert (sent.content == batch.images).all()
        assert covers(device.runtime, batch.images)
    assert device.runtime.calls == ['register']
    iterator.finalize()
    assert device.runtime.calls == ['register', 'unregister']
    assert not device.runtime.registered
    # What was taken before is still sent, from ordinary memory.
    sent = batch.memory.send(batch.images, device)
    assert (sent.content == batch.images).all()
    assert not device.runtime.registered


def test_a_batch_is_sent_by_the_memory_that_it_is_in(batch, monkeypatch):
    fake = FakeDevice()
    labels = []

    class Gpu:
        xp, device = fake.xp, fake

        def send(self, array):
            labels.append(array)
            return array
    monkeypatch.setattr(chainer.backend, 'GpuDevice', Gpu)
    images, found = batch_arrays.base_callable(batch, Gpu())
    assert (images.content == batch.images).all()
    assert found is batch.labels
    assert labels == [batch.labels]
