"""Trains a network on a folder of images over MPI, with large batches.

    mpiexec -n 4 python examples/imagenet/train_imagenet.py ROOT

trains ResNet-50 on ROOT/train/CLASS/*.JPEG and counts on ROOT/val/CLASS how
often it is right.  A small set to try it with comes from make_images.py.
"""
import os
import sys

from chainer_fp8pipe import (
    create_communicator,
    create_grouped_bn_model,
    large_batch,
)
from chainer_fp8pipe.mpi.agreement import raise_together
from chainer_fp8pipe.training.extensions import (
    FollowEpochs,
    MovingAverage,
    Snapshot,
    find_snapshots,
    resume,
)

import chainer
import chainer.links as L
import chainermn
from arguments import check, make_parser
from chainer.training import Trainer, extensions
from classifier import Classifier
from evaluation import Evaluation
from folders import open_folders
from input_report import TimedUpdater
from models import NETWORKS
from reports import announce, finish, report

sys.path.insert(0, os.path.join(os.path.dirname(__file__), os.pardir,
                                'digits'))
from train_digits import (
    explained,
    name_and_options,
    only_rank_0_prints,
    prepare_directory,
    seed_random,
)


def make_communicator(text):
    """The communicator that ``name:option=value,...`` means."""
    name, given = name_and_options(text)
    return create_communicator(name, **given)


def make_model(options, comm, classes):
    """The network, with the same initial weights on all ranks."""
    if options.mixed_precision:
        chainer.global_config.dtype = chainer.mixed16
    network = NETWORKS[options.arch]
    extra = ({'zero_gamma': options.zero_gamma}
             if options.arch == 'resnet50' else {})
    seed_random(options.seed)
    model = Classifier(network(classes, options.insize, **extra),
                       options.label_smoothing)
    group = options.group_bn
    if any(isinstance(link, L.BatchNormalization) for link in model.links()):
        if group == 1 and not options.bn_tile and options.batchsize == 1:
            raise ValueError(
                '--batchsize 1 leaves batch normalisation the statistics of '
                'one image, which says nothing of others; take a larger '
                'batch, or --group-bn')
    elif group > 1 or options.bn_tile:
        raise ValueError(f'{options.arch} has no batch normalisation for '
                         '--group-bn or --bn-tile')
    if options.bn_tile:
        model = create_grouped_bn_model(
            model, comm, tile=options.bn_tile, shape=torus(comm))
    elif group > 1:
        model = create_grouped_bn_model(model, comm, group)
    return model


def torus(comm):
    """The communicator's, if it was given one."""
    shape = getattr(getattr(comm, 'options', None), 'shape', (0, 0))
    return shape if all(shape) else None


def make_optimizer(options, comm, model):
    """Momentum, with the recipe for large batches, over all ranks."""
    batch = options.batchsize * comm.size
    # Below the base batch the rate shrinks, and there is no warm-up to do.
    base = min(options.base_batch, batch)
    optimizer = large_batch(
        chainer.optimizers.MomentumSGD(), batch,
        options.lr * base / options.base_batch, base, options.warmup,
        options.epoch, options.lars, options.decay, options.weight_decay)
    if options.mixed_precision:
        optimizer.loss_scaling()                    # dynamic
    return chainermn.create_multi_node_optimizer(optimizer, comm).setup(model)


def make_trainer(options, comm):
    """All that trains and reports; and the evaluation alone."""
    device = raise_together(
        comm.mpi_comm, lambda: chainer.get_device(
            f'@cupy:{comm.intra_rank}' if options.gpu else '@numpy'),
        error=ValueError)
    device.use()
    options.insize = options.insize or NETWORKS[options.arch].insize
    train, val = open_folders(options, comm, options.insize)
    model = make_model(options, comm, len(train.classes))
    model.to_device(device)
    seed_random(options.seed + 1 + comm.rank)       # other dropout on each
    device.xp.random.seed(options.seed + 1 + comm.rank)
    optimizer = make_optimizer(options, comm, model)

    iterators = [folder.iterator(
        options.batchsize, options.workers, options.prefetch, repeat=is_train,
        shuffle=is_train) for folder, is_train in ((train, True),
                                                   (val, False))]
    updater = TimedUpdater(iterators[0], optimizer, device)
    trainer = Trainer(updater, (options.epoch, 'epoch'), options.out)
    trainer.extend(FollowEpochs())
    average = None
    if options.average:
        average = MovingAverage(model, options.average)
        trainer.extend(average)
    evaluation = Evaluation(iterators[1], model, comm, average, device)
    trainer.extend(evaluation)
    if not hasattr(comm, 'events'):
        # ChainerMN's communicators pass on what is not a number.
        trainer.extend(extensions.FailOnNonNumber())
    report(options, comm, trainer, iterators)
    trainer.extend(Snapshot(comm, retain=2), trigger=(
        (options.snapshot, 'iteration') if options.snapshot
        else (1, 'epoch')))
    return trainer, evaluation


def prepare(options):
    """Makes the directory; returns whether there is a snapshot to go on from.

    Unless the run goes on, an old run's results are moved aside.
    """
    found = False
    if find_snapshots(options.out):
        found = prepare_directory(options.out, options.resume)
    os.makedirs(options.out, exist_ok=True)
    return found


def main():
    parser = make_parser(__doc__)
    with only_rank_0_prints():
        options = parser.parse_args()
    with explained(parser):
        check(options)
        comm = make_communicator(options.communicator)
        trainer, evaluation = make_trainer(options, comm)
        found = comm.mpi_comm.bcast(raise_together(
            comm.mpi_comm,
            lambda: None if comm.rank else prepare(options), ValueError))
        start = resume(trainer, comm, options.out,
                       damaged='aside') if found else 0
    if comm.rank == 0:
        announce(options, comm, trainer, start)
    trainer.run(show_loop_exception_msg=False)
    finish(options, comm, evaluation)


if __name__ == '__main__':
    main()
