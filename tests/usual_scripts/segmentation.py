"""Segmentation: an encoder and decoder, labels that do not count, and an
Evaluator with an evaluate() of its own that measures mIoU."""
import argparse
import copy
import os.path as osp

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions


class SegNet(chainer.Chain):
    def __init__(self, n_class):
        super(SegNet, self).__init__()
        self.n_class = n_class
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 8, 3, pad=1, nobias=True)
            self.conv1_bn = L.BatchNormalization(8)
            self.conv2 = L.Convolution2D(8, 8, 3, pad=1)
            self.upconv = L.Deconvolution2D(8, 8, 4, stride=2, pad=1)
            self.score = L.Convolution2D(8, n_class, 1)

    def forward(self, x):
        h = F.relu(self.conv1_bn(self.conv1(x)))
        h = F.max_pooling_2d(h, 2, 2)
        h = F.relu(self.conv2(h))
        return self.score(F.relu(self.upconv(h)))

    def predict(self, imgs):
        with chainer.using_config('train', False), \
                chainer.function.no_backprop_mode():
            score = self(self.xp.asarray(imgs))
        return F.argmax(score, axis=1).array


class PixelwiseSoftmaxClassifier(chainer.Chain):
    def __init__(self, predictor, ignore_label=-1, class_weight=None):
        super(PixelwiseSoftmaxClassifier, self).__init__()
        with self.init_scope():
            self.predictor = predictor
        self.ignore_label = ignore_label

    def __call__(self, x, t):
        self.y = self.predictor(x)
        self.loss = F.softmax_cross_entropy(
            self.y, t, ignore_label=self.ignore_label)
        chainer.reporter.report({'loss': self.loss}, self)
        return self.loss


class MIoU(extensions.Evaluator):
    trigger = 1, 'epoch'
    default_name = 'validation'
    priority = training.PRIORITY_WRITER

    def evaluate(self):
        iterator = self._iterators['main']
        target = self._targets['main']
        it = copy.copy(iterator)
        union, both = np.zeros(3, np.int64), np.zeros(3, np.int64)
        for batch in it:
            labels = np.stack([label for _, label in batch])
            found = target.predict(np.stack([img for img, _ in batch]))
            for c in range(3):
                union[c] += ((found == c) | (labels == c)).sum()
                both[c] += ((found == c) & (labels == c)).sum()
        report = {'miou': float(np.mean(both / np.maximum(union, 1)))}
        observation = {}
        with chainer.reporter.report_scope(observation):
            chainer.reporter.report(report, target)
        return observation


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--gpu', '-g', type=int, default=-1)
    parser.add_argument('--out', '-o', default='result')
    args = parser.parse_args()
    np.random.seed(1)
    imgs = np.random.rand(16, 3, 8, 8).astype('f')
    labels = (imgs.sum(axis=1) * 1.2).astype(np.int32).clip(0, 2)
    labels[:, 0] = -1
    data = chainer.datasets.TupleDataset(imgs, labels)
    train, val = chainer.datasets.split_dataset(data, 12)
    model = PixelwiseSoftmaxClassifier(SegNet(3))
    optimizer = chainer.optimizers.MomentumSGD(lr=0.05, momentum=0.9)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer.WeightDecay(rate=0.0005))
    train_iter = chainer.iterators.SerialIterator(train, 4)
    val_iter = chainer.iterators.SerialIterator(
        val, 2, shuffle=False, repeat=False)
    updater = training.StandardUpdater(train_iter, optimizer, device=args.gpu)
    trainer = training.Trainer(updater, (3, 'epoch'), out=args.out)
    trainer.extend(MIoU(val_iter, model.predictor))
    trainer.extend(extensions.LogReport())
    if extensions.PlotReport.available():
        trainer.extend(extensions.PlotReport(
            ['main/loss'], x_key='iteration', file_name='loss.png'))
    trainer.extend(extensions.PrintReport(
        ['epoch', 'main/loss', 'validation/main/miou', 'elapsed_time']))
    trainer.extend(extensions.ProgressBar(update_interval=2))
    trainer.run()
    chainer.serializers.save_npz(osp.join(args.out, 'model.npz'), model)


if __name__ == '__main__':
    main()
