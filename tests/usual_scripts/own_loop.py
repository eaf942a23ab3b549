# A classifier in a loop of its own, without a Trainer and without a guard
import argparse
import os
import time

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import cuda, optimizers, serializers

parser = argparse.ArgumentParser()
parser.add_argument('--gpu', '-g', default=-1, type=int)
parser.add_argument('--save', default='result')
args = parser.parse_args()
xp = cuda.cupy if args.gpu >= 0 else np
np.random.seed(0)
os.makedirs(args.save)


class ConvNet(chainer.Chain):
    def __init__(self):
        super(ConvNet, self).__init__(
            conv1=L.Convolution2D(1, 4, 3), conv2=L.Convolution2D(4, 4, 3),
            fc=L.Linear(4 * 16, 3))
        self.train = True

    def __call__(self, x):
        h = F.relu(self.conv2(F.relu(self.conv1(x))))
        if self.train:
            h = F.dropout(h, 0.2)
        return self.fc(h)


x_train = np.random.rand(32, 1, 8, 8).astype(np.float32)
y_train = (x_train.mean(axis=(1, 2, 3)) * 30).astype(np.int) % 3
model = L.Classifier(ConvNet())
if args.gpu >= 0:
    cuda.get_device(args.gpu).use()
    model.to_gpu()
optimizer = optimizers.Adam()
optimizer.setup(model)
optimizer.add_hook(chainer.optimizer.GradientClipping(1.0))
N, batchsize = len(x_train), 8
for epoch in range(1, 4):
    start, sum_loss = time.time(), 0
    model.predictor.train = True
    perm = np.random.permutation(N)
    for i in range(0, N, batchsize):
        x = chainer.Variable(xp.asarray(x_train[perm[i:i + batchsize]]))
        t = chainer.Variable(xp.asarray(
            y_train[perm[i:i + batchsize]].astype(np.int32)))
        optimizer.zero_grads() if hasattr(
            optimizer, 'zero_grads') else model.cleargrads()
        loss = model(x, t)
        loss.backward()
        optimizer.update()
        sum_loss += float(loss.data) * len(t.data)
    model.predictor.train = False
    with chainer.using_config('train', False):
        accuracy = F.accuracy(model.predictor(xp.asarray(x_train)),
                              xp.asarray(y_train.astype(np.int32)))
    print('epoch', epoch, 'loss', sum_loss / N, 'accuracy', accuracy.data)
    serializers.save_npz('{}/model_{}.npz'.format(args.save, epoch), model)
serializers.save_npz(args.save + '/model.npz', model)
serializers.save_npz(args.save + '/state.npz', optimizer)
