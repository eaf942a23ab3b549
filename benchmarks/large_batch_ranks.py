"""What the ranks of the large-batch study do.

A job says which ways of training to run, for which batch and which seeds.
"""
from __future__ import annotations

import chainer_fp8pipe
from chainer_fp8pipe.mpi.waiting import wait_until
from chainer_fp8pipe.training.grouped_bn_model import create_grouped_bn_model
from chainer_fp8pipe.training.large_batch import large_batch

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
from environment import as_rank

#: Samples that batch normalisation should see at a time, where grouped.
NORMALISED = 64


class Net(chainer.Chain):
    """Three convolutions with batch normalisation, and the image's mean."""

    def __init__(self, channels, classes=10):
        super().__init__()
        he = chainer.initializers.HeNormal()
        with self.init_scope():
            for number, (inner, outer) in enumerate(
                    [(channels, 8), (8, 16), (16, 32)]):
                setattr(self, f'conv{number}', L.Convolution2D(
                    inner, outer, 3, pad=1, nobias=True, initialW=he))
                setattr(self, f'bn{number}', L.BatchNormalization(outer))
            self.last = L.Linear(32, classes)

    def forward(self, x, finetune=False):
        h = F.relu(self.bn0(self.conv0(x), finetune=finetune))
        h = F.relu(self.bn1(self.conv1(h), finetune=finetune))
        h = F.max_pooling_2d(h, 2)
        h = F.relu(self.bn2(self.conv2(h), finetune=finetune))
        return self.last(F.average(h, axis=(2, 3)))


def main(comm, job):
    data = dict(numpy.load(job['data']))
    rows = []
    for seed in job['seeds']:
        for method in job['methods']:
            rows.append({'seed': seed, 'method': method['name'],
                         'batch': job['batch'], **train(
                             comm, data, seed, method, job)})
    return rows


def train(comm, data, seed, method, job):
    """One training: test accuracy and the last epoch's mean loss."""
    images, labels = data['images'], data['labels']
    batch, samples = job['batch'], job['samples']
    order = numpy.random.RandomState(seed).permutation(len(labels))
    learn, test = order[:samples], order[samples:]
    numpy.random.seed(seed)
    model = Net(images.shape[1])
    if comm.size > 1:
        model = create_grouped_bn_model(model, comm, job['group'])
    optimizer = large_batch(
        chainer.optimizers.MomentumSGD(), batch, method['base_lr'],
        job['base_batch'], method['warmup_epochs'], job['epochs'],
        lars=method['lars'], weight_decay=method['weight_decay'],
        samples=samples, lars_coefficient=method['coefficient'])
    communicator = chainer_fp8pipe.create_communicator(
        'float32', comm, nonfinite='pass')
    optimizer = chainermn.create_multi_node_optimizer(optimizer, communicator)
    optimizer.setup(model)
    # Spends the update that ChainerMN's optimizer only broadcasts in.
    model.cleargrads()
    optimizer.update()
    losses = []
    with numpy.errstate(all='ignore'):      # what diverges is a result, too
        for chosen in batches(learn, batch, job['epochs'], seed):
            own = chosen[comm.rank::comm.size]
            loss = F.softmax_cross_entropy(model(images[own]), labels[own])
            model.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(comm.allreduce(float(loss.array)) / comm.size)
    communicator.finalize()
    tail = max(samples // batch, 1)
    result = {'updates': len(losses),
              'loss': float(numpy.mean(losses[-tail:]))}
    if comm.rank == 0:
        with numpy.errstate(all='ignore'):
            result |= test_accuracies(model, images, labels, learn, test)
    wait_until(comm.Ibarrier().Test)
    return result


def test_accuracies(model, images, labels, learn, test):
    """With the statistics of the training set, and with running ones.

    After a few dozen updates running averages are still those of weights
    long gone, which would hide what the weights have learnt.
    """
    alone = Net(images.shape[1])
    alone.copyparams(model)
    running = evaluate(alone, images[test], labels[test])
    for link in alone.links():
        if isinstance(link, L.BatchNormalization):
            link.start_finetuning()
    with chainer.no_backprop_mode():
        for start in range(0, len(learn), NORMALISED):
            alone(images[learn[start:start + NORMALISED]], finetune=True)
    return {'accuracy': evaluate(alone, images[test], labels[test]),
            'running': running}


def batches(learn, batch, epochs, seed):
    """Whole batches, of one permutation per epoch after the other."""
    random = numpy.random.RandomState(seed + 1000)
    waiting = numpy.zeros(0, int)
    for _ in range(epochs * len(learn) // batch):
        while len(waiting) < batch:
            waiting = numpy.append(waiting, random.permutation(learn))
        yield waiting[:batch]
        waiting = waiting[batch:]


def evaluate(model, images, labels):
    """The share of right answers, in per cent."""
    right = 0
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        for start in range(0, len(labels), 500):
            part = slice(start, start + 500)
            found = model(images[part]).array.argmax(1)
            right += int((found == labels[part]).sum())
    return 100 * right / len(labels)


if __name__ == '__main__':
    as_rank(main)
