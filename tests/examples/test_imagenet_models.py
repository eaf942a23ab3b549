"""The networks of the ImageNet example, against what was published."""
import functools

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import runs

module = functools.partial(runs.module, 'imagenet')
NETWORKS = module('models').NETWORKS


# torchvision's resnet50; Caffe's bvlc_reference_caffenet and bvlc_googlenet
# (two auxiliary classifiers of 3.19 M each).
@pytest.mark.parametrize(('name', 'parameters'), [
    ('resnet50', 25_557_032), ('caffenet', 60_965_224),
    ('googlenet', 13_378_280)])
def test_it_has_as_many_parameters_as_published(name, parameters):
    with runs.quick_initial_values():
        assert NETWORKS[name]().count_params() == parameters


@pytest.mark.parametrize(('name', 'least'), [
    ('resnet50', 1), ('caffenet', 55), ('googlenet', 79), ('small', 1)])
def test_it_scores_images_of_the_size_it_was_made_for(name, least):
    for insize in least, least + 3:
        model = NETWORKS[name](7, insize)
        x = numpy.zeros((2, 3, insize, insize), 'f')
        with chainer.using_config('train', False):
            assert model(x).shape == (2, 7)
        scores = model(x)
        if name == 'googlenet':
            assert len(scores) == 3
        else:
            scores = [scores]
        assert {y.shape for y in scores} == {(2, 7)}
    model.cleargrads()
    sum(F.sum(y) for y in scores).backward()
    assert all(parameter.grad is not None for parameter in model.params())
    if least > 1:
        with pytest.raises(ValueError,
                           match=f'an insize of {least - 1} is too small'):
            NETWORKS[name](7, least - 1)


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_responses_are_normalised_as_in_caffe(dtype):
    x = 400 * numpy.random.default_rng(0).random((2, 7, 3, 2)) - 100
    x = x.astype(dtype)         # whose squares leave float16
    y = module('models.layers').response_normalisation(x)
    assert y.dtype == dtype
    wide = x.astype(float)
    for channel in range(7):
        near = wide[:, max(channel - 2, 0):channel + 3]
        expected = wide[:, channel] / (
            1 + 1e-4 / 5 * (near ** 2).sum(axis=1)) ** 0.75
        numpy.testing.assert_allclose(
            y.array[:, channel], expected,
            rtol=1e-5 if dtype == 'float32' else 1e-3)


@given(st.data())
def test_hits_are_those_of_a_sorted_list(data):
    samples, classes = data.draw(st.tuples(st.integers(1, 5),
                                           st.integers(1, 8)))
    # Few values, so that many are equal.
    y = numpy.array(data.draw(st.lists(
        st.lists(st.sampled_from([-1.5, 0.0, 2.0]), min_size=classes,
                 max_size=classes), min_size=samples, max_size=samples)), 'f')
    labels = numpy.array(data.draw(st.lists(
        st.integers(0, classes - 1), min_size=samples, max_size=samples)),
        numpy.int32)
    order = numpy.argsort(-y, axis=1, kind='stable')
    hits = module('classifier').hits
    for among in 1, 5:
        expected = [label in row[:among]
                    for label, row in zip(labels, order, strict=True)]
        assert hits(chainer.Variable(y), labels, among).tolist() == expected


def classifier(predictor, smoothing=0.1):
    model = module('classifier').Classifier(predictor, smoothing)
    images = numpy.random.default_rng(0).integers(
        0, 256, (4, 3, 6, 6), numpy.uint8)
    return model, images, numpy.array([0, 2, 1, 2], numpy.int32)


class Threefold(chainer.Chain):
    """Has auxiliary classifiers in training, as GoogLeNet has."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.parts = chainer.ChainList(*(L.Linear(108, 3)
                                             for _ in range(3)))

    def forward(self, x):
        scores = tuple(part(x) for part in self.parts)
        return scores if chainer.config.train else scores[0]


def test_auxiliary_losses_count_less_and_only_in_training():
    model, images, labels = classifier(Threefold())
    x = (images / 255 - [[[0.485]], [[0.456]], [[0.406]]]) / [
        [[0.229]], [[0.224]], [[0.225]]]
    logs = [F.log_softmax(part(x.astype('f'))).array
            for part in model.predictor.parts]
    plain = [-log[range(4), labels].mean() for log in logs]
    smoothed = [0.9 * loss - 0.1 * log.mean()
                for loss, log in zip(plain, logs, strict=True)]
    assert model(images, labels).array == pytest.approx(
        smoothed[0] + 0.3 * smoothed[1] + 0.3 * smoothed[2], rel=1e-5)
    with chainer.using_config('train', False):
        loss, first, five = model.score(images, labels)
    assert loss == pytest.approx(4 * plain[0], rel=1e-5)
    assert first == (logs[0].argmax(axis=1) == labels).sum()
    assert five == 4


def test_it_computes_in_float16_where_chainer_does():
    with chainer.using_config('dtype', chainer.mixed16):
        model, images, labels = classifier(NETWORKS['small'](3, 6))
    y = model.predictor(model._normalise(images))
    assert y.dtype == numpy.float16
    assert model(images, labels).dtype == numpy.float32
