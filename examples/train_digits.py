"""Trains a small network on handwritten digits, each rank on its share.

    mpiexec -n 4 python examples/train_digits.py --communicator fp8

is ChainerMN's way of training with another communicator.  Compare what it
says at the end with that of --communicator float32.
"""
import json
import os

import chainer_fp8pipe
from chainer_fp8pipe.training.extensions import CommunicationReport

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import common
from chainer import training
from chainer.training import extensions
from mpi4py import MPI


class ConvNet(chainer.Chain):
    """Three convolutions, the mean over the image, two dense layers."""

    def __init__(self):
        super().__init__()
        # For layers followed by a ReLU: Chainer's default shrinks the signal.
        he = chainer.initializers.HeNormal()
        with self.init_scope():
            self.conv1 = L.Convolution2D(1, 32, 3, pad=1, initialW=he)
            self.conv2 = L.Convolution2D(32, 64, 3, pad=1, initialW=he)
            self.conv3 = L.Convolution2D(64, 64, 3, pad=1, initialW=he)
            self.fc1 = L.Linear(64, 64, initialW=he)
            self.fc2 = L.Linear(64, 10)

    def forward(self, x):
        h = F.relu(self.conv1(x))
        h = F.max_pooling_2d(F.relu(self.conv2(h)), 2)
        h = F.average(F.relu(self.conv3(h)), axis=(2, 3))
        h = F.dropout(F.relu(self.fc1(h)), 0.2)
        return self.fc2(h)


class Dense(chainer.Chain):
    """Two hidden layers: many gradients, and little to compute."""

    def __init__(self):
        super().__init__()
        he = chainer.initializers.HeNormal()
        with self.init_scope():
            self.fc1 = L.Linear(64, 512, initialW=he)
            self.fc2 = L.Linear(512, 512, initialW=he)
            self.fc3 = L.Linear(512, 10)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


NETWORKS = {'conv': ConvNet, 'dense': Dense}


def make_trainer(options):
    """The Trainer, and the communicator that its optimizer sends by."""
    sets = common.digits()
    share = -(-len(sets[0]) // MPI.COMM_WORLD.size)
    updates = -(-share * options.epoch // options.batchsize)
    given = {}
    if options.communicator.startswith(('fp8', 'int')):
        given['warmup'] = (updates // 20 if options.warmup is None
                           else options.warmup)
    comm = chainer_fp8pipe.create_communicator(options.communicator, **given)
    train, test = (chainermn.scatter_dataset(
        one if comm.rank == 0 else None, comm) for one in sets)

    common.seed_random(options.seed)                    # the same weights
    model = L.Classifier(NETWORKS[options.network]())
    device = chainer.get_device(options.device)
    device.use()
    model.to_device(device)
    common.seed_random(options.seed + 1 + comm.rank)    # different batches
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(options.lr), comm).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))

    iterator = chainer.iterators.SerialIterator(train, options.batchsize)
    trainer = training.Trainer(
        training.StandardUpdater(iterator, optimizer, device=device),
        (options.epoch, 'epoch'), options.out)
    iterator = chainer.iterators.SerialIterator(
        test, 256, repeat=False, shuffle=False)
    trainer.extend(chainermn.create_multi_node_evaluator(
        extensions.Evaluator(iterator, model, device=device), comm))
    trainer.extend(common.follow_cosine(options.lr, updates),
                   trigger=(1, 'iteration'))
    if hasattr(comm, 'events'):         # not ChainerMN's own
        trainer.extend(CommunicationReport(comm))
    return trainer, comm


def parse():
    parser = common.make_parser(__doc__, 'digits', 20, 8, 0.05, 'a rank')
    parser.add_argument('--communicator', metavar='NAME', default='fp8',
                        help='float32, float16, fp8, fp8_paper, int4, or one '
                        'of ChainerMN, e.g. naive (default: fp8)')
    parser.add_argument('--warmup', type=int, metavar='UPDATES',
                        help='in float32, before the first in fp8 or int4 '
                        '(default: 5 %% of all)')
    parser.add_argument('--network', choices=NETWORKS, default='conv',
                        help='conv: convolutions; dense: more gradients and '
                        'less to compute (default: conv)')
    parser.add_argument('--device', default='@numpy', metavar='NAME',
                        help='as chainer.get_device names it; @cupy:0 is the '
                        'first GPU (default: @numpy)')
    return common.parse(parser)


def main():
    options = parse()
    trainer, comm = make_trainer(options)
    common.run(trainer, comm, options,
               ['main/loss', 'validation/main/accuracy'])
    if comm.rank == 0:
        model = trainer.updater.get_optimizer('main').target
        chainer.serializers.save_npz(
            os.path.join(options.out, 'model.npz'), model)
        with open(os.path.join(options.out, 'log')) as file:
            last = json.load(file)[-1]
        sent = last.get('comm/bytes')
        print(f'{options.communicator}: '
              f'{100 * last["validation/main/accuracy"]:.2f} % of the test '
              f'images after {last["elapsed_time"]:.1f} s'
              + (f'; each rank sent {sent:,.0f} bytes per update for '
                 f'{model.count_params():,} gradients' if sent else ''))


if __name__ == '__main__':
    main()
