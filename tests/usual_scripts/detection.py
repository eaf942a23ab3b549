"""A detector in the style of ChainerCV's SSD: a training chain, a converter
for boxes of any number, hooks on single parameters, a step in the rate."""
import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.optimizer_hooks import WeightDecay
from chainer.training import extensions, triggers


class GradientScaling(object):
    name = 'GradientScaling'
    call_for_each_param = True

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, rule, param):
        g = param.grad
        with chainer.cuda.get_device_from_array(g):
            g *= self.rate


class SSD(chainer.Chain):
    def __init__(self, n_fg_class=3):
        super(SSD, self).__init__()
        self.n_class = n_fg_class + 1
        with self.init_scope():
            self.conv1 = L.Convolution2D(None, 8, 3, pad=1)
            self.conv2 = L.Convolution2D(None, 8, 3, pad=1, stride=2)
            self.loc = L.Convolution2D(None, 4, 1)
            self.conf = L.Convolution2D(None, self.n_class, 1)

    def __call__(self, x):
        h = F.relu(self.conv2(F.relu(self.conv1(x))))
        h = F.normalize(h) * 4
        locs = F.transpose(self.loc(h), (0, 2, 3, 1))
        confs = F.transpose(self.conf(h), (0, 2, 3, 1))
        n = x.shape[0]
        return (F.reshape(locs, (n, -1, 4)),
                F.reshape(confs, (n, -1, self.n_class)))


class MultiboxTrainChain(chainer.Chain):
    def __init__(self, model, alpha=1):
        super(MultiboxTrainChain, self).__init__()
        with self.init_scope():
            self.model = model
        self.alpha = alpha

    def forward(self, imgs, gt_mb_locs, gt_mb_labels):
        mb_locs, mb_confs = self.model(imgs)
        xp = self.xp
        positive = gt_mb_labels > 0
        n_positive = max(int(positive.sum()), 1)
        loc_loss = F.sum(F.huber_loss(
            mb_locs, gt_mb_locs, 1, reduce='no')
            * positive[..., None].astype(xp.float32)) / n_positive
        conf_loss = F.softmax_cross_entropy(
            F.reshape(mb_confs, (-1, self.model.n_class)),
            gt_mb_labels.reshape(-1), ignore_label=-1)
        loss = loc_loss * self.alpha + conf_loss
        chainer.reporter.report({
            'loss': loss, 'loss/loc': loc_loss, 'loss/conf': conf_loss}, self)
        return loss


class Images(chainer.dataset.DatasetMixin):
    def __init__(self, n):
        self.rand = np.random.RandomState(1)
        self.imgs = self.rand.rand(n, 3, 8, 8).astype(np.float32)
        self.boxes = self.rand.randint(0, 3, (n, 16)).astype(np.int32)

    def __len__(self):
        return len(self.imgs)

    def get_example(self, i):
        labels = self.boxes[i]
        # As many positive boxes in each image, so that parts of a batch
        # weigh alike.
        labels = np.where(np.arange(16) < 4, np.maximum(labels, 1), 0)
        locs = np.linspace(-1, 1, 64).reshape(16, 4) * (i + 1) / 10
        return self.imgs[i], locs.astype(np.float32), labels.astype(np.int32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--batchsize', type=int, default=8)
    parser.add_argument('--gpu', type=int, default=-1)
    parser.add_argument('--out', default='result')
    parser.add_argument('--resume')
    args = parser.parse_args()
    np.random.seed(0)
    model = SSD()
    train_chain = MultiboxTrainChain(model)
    if args.gpu >= 0:
        chainer.cuda.get_device_from_id(args.gpu).use()
        model.to_gpu()
    train_iter = chainer.iterators.SerialIterator(
        Images(16), args.batchsize, shuffle=False)
    optimizer = chainer.optimizers.MomentumSGD(0.05)
    optimizer.setup(train_chain)
    for param in train_chain.params():
        if param.name == 'b':
            param.update_rule.add_hook(GradientScaling(2))
        else:
            param.update_rule.add_hook(WeightDecay(0.0005))
    updater = chainer.training.updaters.StandardUpdater(
        train_iter, optimizer, device=args.gpu)
    trainer = chainer.training.Trainer(updater, (3, 'epoch'), args.out)
    trainer.extend(
        extensions.ExponentialShift('lr', 0.1, init=0.05),
        trigger=triggers.ManualScheduleTrigger([4, 5], 'iteration'))
    trainer.extend(extensions.LogReport(trigger=(1, 'iteration')))
    trainer.extend(extensions.observe_lr(), trigger=(1, 'iteration'))
    trainer.extend(extensions.PrintReport(
        ['epoch', 'iteration', 'lr', 'main/loss', 'main/loss/loc']))
    trainer.extend(extensions.snapshot_object(
        model, 'model_iter_{.updater.iteration}'), trigger=(3, 'epoch'))
    if args.resume:
        chainer.serializers.load_npz(args.resume, trainer)
    trainer.run()
    chainer.serializers.save_npz(args.out + '/model.npz', train_chain)


if __name__ == '__main__':
    main()
