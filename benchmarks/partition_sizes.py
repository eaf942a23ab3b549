"""The models whose times count, and how a rank trains them."""
from __future__ import annotations

from chainer_fp8pipe import PipelineUpdater, partition

import chainer
import chainer.links as L
import numpy
from models.encoder import Encoder
from models.zoo import Trained
from pipeline_ranks import Same

LAYERS, HEADS, VOCABULARY, LENGTH = 12, 4, 1000, 32


def units(scale):
    """Of the encoder: 256, or as many as a scale says."""
    return max(int(64 * scale), 1) * HEADS


def encoder(scale=1.0):
    """A masked language model of 12 layers: 10 million parameters."""
    return Encoder(VOCABULARY, units(scale), HEADS, LAYERS, LENGTH)


def encoder_batch(scale=1.0, samples=16):
    """Tokens without padding; seven of ten are not asked for."""
    rng = numpy.random.RandomState(0)
    tokens = rng.randint(0, VOCABULARY, (samples, LENGTH)).astype('i')
    targets = rng.randint(0, VOCABULARY, (samples, LENGTH)).astype('i')
    targets[rng.uniform(size=targets.shape) < .7] = -1
    targets[:, 0] = 0
    return tokens, targets


def resnet50(scale=1.0):
    """Chainer's own."""
    return Trained(L.ResNet50Layers(pretrained_model=None), 'fc6')


def resnet50_batch(scale=1.0, samples=16):
    """Images of 64 x 64 pixels, or as a scale says."""
    rng = numpy.random.RandomState(0)
    size = max(int(64 * scale), 32)
    return (rng.normal(0, 1, (samples, 3, size, size)).astype('f'),
            rng.randint(0, 1000, samples).astype('i'))


#: What makes a model, and its batch.
LARGE = {'encoder': (encoder, encoder_batch),
         'resnet50': (resnet50, resnet50_batch)}


def made(name, scale):
    """A model and its batch."""
    numpy.random.seed(0)
    model, batch = LARGE[name]
    return model(scale), batch(scale)


def part(batch, parts):
    """The first micro-batch."""
    return tuple(array[:len(array) // parts] for array in batch)


def cut(model, batch, comm, parts, **options):
    """A model over the ranks, and the update of a step."""
    partition(model, part(batch, parts), comm, micro_batches=parts,
              **{'optimizer_arrays': 0, **options})
    return trained(model, batch, comm, parts)


def trained(model, batch, comm, parts, optimizer=None, **options):
    """An updater with one batch for ever."""
    optimizer = optimizer or chainer.optimizers.SGD(1e-4).setup(model)
    return PipelineUpdater(
        Same(batch), optimizer, comm, micro_batches=parts,
        converter=_as_it_is, **options)


def reported(updater):
    """Updates without a word of what links report."""
    reporter = chainer.Reporter()
    model = updater.get_optimizer('main').target
    reporter.add_observer('main', model)
    reporter.add_observers('main', model.namedlinks(skipself=True))

    def update():
        with reporter:
            updater.update()
    return update


def _as_it_is(batch, device):
    return batch


