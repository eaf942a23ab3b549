"""Trains as Chainer's own MNIST example does; knows nothing of ranks.

``test_run_pipeline.py`` runs it on one rank and on several.
"""
import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions


class MLP(chainer.Chain):
    def __init__(self, n_units, n_out):
        super().__init__()
        with self.init_scope():
            # the size of the inputs to each layer will be inferred
            self.l1 = L.Linear(None, n_units)
            self.l2 = L.Linear(None, n_units)
            self.l3 = L.Linear(None, n_out)

    def forward(self, x):
        h1 = F.relu(self.l1(x))
        h2 = F.relu(self.l2(h1))
        return self.l3(h2)


def load_digits(count):
    """Something like digits; a data set in a file would be slow to import."""
    random = np.random.RandomState(0)
    labels = random.randint(0, 10, count).astype(np.int32)
    images = random.rand(10, 64)[labels] + random.rand(count, 64)
    return chainer.datasets.TupleDataset(
        images.astype(np.float32) / 2, labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--batchsize', '-b', type=int, default=60)
    parser.add_argument('--epoch', '-e', type=int, default=2)
    parser.add_argument('--device', '-d', default='-1')
    parser.add_argument('--out', '-o', default='result')
    parser.add_argument('--resume', '-r')
    parser.add_argument('--seed', type=int)
    parser.add_argument('--snapshot', action='store_true')
    parser.add_argument('--autoload', action='store_true')
    parser.add_argument('--hooks', action='store_true')
    parser.add_argument('--plot', action='store_true')
    args = parser.parse_args()
    if args.seed is not None:
        np.random.seed(args.seed)

    device = chainer.get_device(int(args.device))
    print(f'# epoch: {args.epoch}')
    model = L.Classifier(MLP(32, 10))
    model.to_device(device)
    device.use()
    optimizer = chainer.optimizers.Adam(0.01)
    optimizer.setup(model)
    if args.hooks:
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.01))
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.5))

    train, test = chainer.datasets.split_dataset_random(
        load_digits(700), 500, seed=args.seed)
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, args.batchsize, repeat=False, shuffle=False)

    updater = training.updaters.StandardUpdater(
        train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, 'epoch'), out=args.out)
    trainer.extend(extensions.Evaluator(test_iter, model, device=device))
    trainer.extend(extensions.DumpGraph('main/loss'))
    if args.snapshot:
        trainer.extend(extensions.snapshot(n_retains=2,
                                           autoload=args.autoload))
        trainer.extend(extensions.snapshot_object(
            model, 'model_iter_{.updater.iteration}'))
    trainer.extend(extensions.LogReport())
    if args.plot and extensions.PlotReport.available():
        trainer.extend(extensions.PlotReport(
            ['main/loss', 'validation/main/loss'], 'epoch',
            filename='loss.png'))
    trainer.extend(extensions.PrintReport(
        ['epoch', 'main/loss', 'validation/main/loss',
         'main/accuracy', 'validation/main/accuracy']))
    trainer.extend(extensions.ProgressBar(update_interval=5))
    if args.resume is not None:
        chainer.serializers.load_npz(args.resume, trainer)
    trainer.run()
    chainer.serializers.save_npz(args.out + '/whole.npz', model)
    chainer.serializers.save_npz(args.out + '/predictor.npz',
                                 model.predictor)
    chainer.serializers.save_npz(args.out + '/optimizer.npz', optimizer)
    print('# done')


if __name__ == '__main__':
    main()
