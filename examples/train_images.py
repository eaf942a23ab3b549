"""Trains on a folder of images with large batches, each rank on its share.

    mpiexec -n 2 python examples/train_images.py --images ROOT

reads ROOT/train/CLASS/*.JPEG and ROOT/val/CLASS/*.JPEG.  Without --images,
the digits are written to OUT/images and trained on.  The learning rate grows
with the batch of all ranks, by the recipe for large batches with LARS.
"""
import os

from chainer_fp8pipe import (
    CenterCrop,
    ImageFolder,
    RandomResizedCrop,
    batch_arrays,
    create_communicator,
    create_grouped_bn_model,
    large_batch,
)
from chainer_fp8pipe.images.transforms import Normalise
from chainer_fp8pipe.training.losses import smoothed_cross_entropy

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import common
from chainer import training
from chainer.training import extensions

HE = chainer.initializers.HeNormal()


class Small(chainer.Chain):
    """Bytes of images to scores: three convolutions and a dense layer."""

    def __init__(self, classes):
        super().__init__()
        with self.init_scope():
            self.convs, self.norms = chainer.ChainList(), chainer.ChainList()
            for inputs, outputs in (3, 16), (16, 32), (32, 64):
                self.convs.append(L.Convolution2D(
                    inputs, outputs, 3, 2, 1, nobias=True, initialW=HE))
                self.norms.append(L.BatchNormalization(outputs))
            self.fc = L.Linear(64, classes)
        # Images come as bytes, a quarter of the memory and of the way.
        self.normalise = Normalise()

    def forward(self, x):
        h = self.normalise(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = F.relu(norm(conv(h)))
        return self.fc(F.average(h, axis=(2, 3)))


def write_digits(root):
    """The digits as JPEG files, four times as large as they are."""
    from PIL import Image
    for name, digits in zip(('train', 'val'), common.digits(), strict=True):
        for number, (image, label) in enumerate(digits):
            folder = os.path.join(root, name, str(label))
            os.makedirs(folder, exist_ok=True)
            Image.fromarray((255 * image[0]).astype('u1')).resize(
                (32, 32)).save(os.path.join(folder, f'{number}.JPEG'))


def parse():
    parser = common.make_parser(__doc__, 'images', 12, 64, 4.0, 'a rank')
    parser.add_argument('--images', metavar='ROOT',
                        help='folder with train and val (default: digits)')
    parser.add_argument('--insize', type=common.count, default=32,
                        metavar='N',
                        help='sides of a crop, in pixels (default: 32)')
    parser.add_argument('--communicator', metavar='NAME', default='fp8',
                        help='fp8 (default), int4, float16, float32')
    parser.add_argument('--group-bn', type=common.count, default=1,
                        metavar='RANKS', help='so many consecutive ranks '
                        'share the statistics of batch normalisation '
                        '(default: 1)')
    parser.add_argument('--workers', type=common.count, default=1,
                        metavar='N', help='threads of a rank that decode '
                        '(default: 1)')
    return common.parse(parser)


def main():
    options = parse()
    comm = create_communicator(options.communicator)
    root = options.images or os.path.join(options.out, 'images')
    if not options.images and comm.rank == 0 and not os.path.isdir(root):
        write_digits(root)
    comm.mpi_comm.Barrier()
    train, val = (
        ImageFolder(os.path.join(root, name), transform, 2 << 30, shard=comm,
                    seed=options.seed)
        for name, transform in (
            ('train', RandomResizedCrop(options.insize, (0.6, 1),
                                        flip=0, normalise=None)),
            ('val', CenterCrop(options.insize, normalise=None))))

    common.seed_random(options.seed)
    model = L.Classifier(Small(len(train.classes)),
                         lossfun=smoothed_cross_entropy)
    if options.group_bn > 1:
        model = create_grouped_bn_model(model, comm, options.group_bn)
    optimizer = large_batch(
        chainer.optimizers.MomentumSGD(), batch=options.batchsize * comm.size,
        base_lr=options.lr / comm.size, base_batch=options.batchsize,
        warmup_epochs=options.epoch / 4, epochs=options.epoch,
        samples=len(train))
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)

    iterator = train.iterator(options.batchsize, options.workers, prefetch=4)
    updater = training.StandardUpdater(iterator, optimizer,
                                       converter=batch_arrays)
    trainer = training.Trainer(updater, (options.epoch, 'epoch'), options.out)
    validation = val.iterator(options.batchsize, options.workers, prefetch=4,
                              repeat=False, shuffle=False)
    trainer.extend(chainermn.create_multi_node_evaluator(
        extensions.Evaluator(validation, model, batch_arrays), comm))
    if comm.rank == 0:
        trainer.extend(extensions.observe_lr())
    common.run(trainer, comm, options,
               ['main/loss', 'validation/main/accuracy', 'lr'])
    validation.finalize()

    if comm.rank == 0:
        chainer.serializers.save_npz(
            os.path.join(options.out, 'model.npz'), model)
        accuracy = trainer.observation['validation/main/accuracy']
        batch = options.batchsize * comm.size
        print(f'{100 * float(accuracy):.2f} % of the test images after '
              f'{updater.iteration} updates of {batch} images at a rate of '
              f'{options.lr} at most: '
              f'{updater.iteration * batch / trainer.elapsed_time:,.0f} '
              'images per second')


if __name__ == '__main__':
    main()
