import copy
import pickle

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
