"""Trains a small network on handwritten digits over MPI, in several ways.

    mpiexec -n 4 python examples/digits/train_digits.py

trains it three times from the same initial weights, with gradients averaged
in float32, in fp8 and in fp8 as the paper has it, and compares the three in
a table and a picture.
"""
import argparse
import contextlib
import json
import math
import os
import random
import sys

import chainer_fp8pipe
from chainer_fp8pipe import RunReport
from chainer_fp8pipe.communicators.options import FAMILIES, parse_option
from chainer_fp8pipe.compat import require_gpu
from chainer_fp8pipe.training.extensions import (
    CommunicationReport,
    CompressionReport,
    Snapshot,
    find_snapshots,
    resume,
)

import chainer
import chainer.links as L
import chainermn
import numpy
from chainer.training import Trainer, extensions
from chainer.training.updaters import StandardUpdater
from data import load
from model import NETWORKS
from mpi4py import MPI
from report import (
    plot_curves,
    print_table,
    summarise,
    write_report,
)


def parse(arguments=None):
    """The command line; only rank 0 prints help and errors."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--network', choices=NETWORKS, default='conv',
        help='convolutions (conv, the default), or dense layers of 512 '
        '(dense), which have more gradients and less to compute')
    parser.add_argument(
        '--communicator', nargs='+', metavar='NAME',
        default=['float32', 'fp8', 'fp8_paper'],
        help='train with each of these (default: float32 fp8 fp8_paper); '
        'also float16 and any of ChainerMN, e.g. naive; options follow a '
        'colon: fp8:period=50,warmup=20')
    parser.add_argument('--epoch', type=int, default=20,
                        help='passes over the training set (default: 20)')
    parser.add_argument('--until', type=float, metavar='PERCENT',
                        help='end a run after the first epoch with so much '
                        'test accuracy')
    parser.add_argument('--batchsize', type=int, default=8,
                        help='images per rank and update (default: 8)')
    parser.add_argument('--lr', type=float, default=0.05,
                        help='learning rate at the start; it falls to zero '
                        'along half a cosine (default: 0.05)')
    parser.add_argument(
        '--warmup', type=int, metavar='UPDATES',
        help='updates in float32 before the first in fp8 (default: 5 %% of '
        'all)')
    parser.add_argument('--seed', type=int, default=0,
                        help='of weights and batches (default: 0)')
    parser.add_argument(
        '--resume', action='store_true',
        help='go on from the newest snapshots in OUT, if there are any')
    parser.add_argument(
        '--dataset', choices=['digits', 'mnist', 'cifar10'], default='digits',
        help='digits are here; mnist and cifar10 are read from files in '
        'their original formats in --root')
    parser.add_argument('--root', metavar='DIR',
                        help='where the files of mnist or cifar10 are')
    parser.add_argument(
        '--device', default='@numpy', metavar='NAME',
        help='where every rank trains, as chainer.get_device names it: '
        '@cupy:0 is the first GPU, for all ranks (default: @numpy)')
    parser.add_argument(
        '--report', action=argparse.BooleanOptionalAction, default=True,
        help='record each run on all ranks, and make a page and pictures '
        'that compare them: OUT/report.html, OUT/curves.png (default: yes)')
    parser.add_argument('--out', default='result', metavar='OUT',
                        help='directory for results (default: result)')
    with only_rank_0_prints():
        options = parser.parse_args(arguments)
        if options.dataset != 'digits' and not options.root:
            parser.error(f'--dataset {options.dataset} needs --root DIR')
        if options.dataset == 'digits' and options.root:
            parser.error('--root is for --dataset mnist and cifar10')
        for name in ('epoch', 'batchsize'):
            if getattr(options, name) < 1:
                parser.error(f'--{name} must be at least 1')
    with explained(parser):     # before the first run has taken its time
        for text in options.communicator:
            create_communicator(options, text, 0).finalize()
    return options


@contextlib.contextmanager
def only_rank_0_prints():
    """Four ranks would print help and errors four times."""
    if MPI.COMM_WORLD.rank == 0:
        yield
        return
    with open(os.devnull, 'w') as nowhere, contextlib.redirect_stdout(
            nowhere), contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def explained(parser):
    """A wrong argument, which all ranks find, is an error of rank 0's."""
    try:
        yield
    except ValueError as error:
        with only_rank_0_prints():
            parser.error(str(error))


def load_on_root(options):
    """Both data sets on rank 0, None elsewhere; ends all ranks on failure."""
    datasets, problem = (None, None), None
    if MPI.COMM_WORLD.rank == 0:
        try:
            datasets = load(options.dataset, options.root)
        except Exception as error:      # or the others wait for ever
            problem = f'{type(error).__name__}: {error}'
            print(f'{sys.argv[0]}: {problem}', file=sys.stderr)
    if MPI.COMM_WORLD.bcast(problem):
        sys.exit(1)
    return datasets


def train(options, name, datasets):
    """One training run; returns what the table and the picture need."""
    train_set, test_set = datasets
    updates = -(-len(train_set) * options.epoch // options.batchsize)
    comm = create_communicator(options, name, updates)
    out = os.path.join(options.out, name)
    found = MPI.COMM_WORLD.bcast(prepare_directory(out, options.resume))

    seed_random(options.seed)                   # same weights on all ranks
    model = make_model(options, train_set)
    device = use_device(options.device)
    model.to_device(device)
    seed_random(options.seed + 1 + comm.rank)   # other batches on each
    device.xp.random.seed(options.seed + 1 + comm.rank)     # dropout

    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(options.lr), comm).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))
    iterator = chainer.iterators.SerialIterator(train_set, options.batchsize)
    trainer = Trainer(StandardUpdater(iterator, optimizer, device=device),
                      Until(options.epoch, options.until, comm), out)

    test_iterator = chainer.iterators.SerialIterator(
        test_set, 256, repeat=False, shuffle=False)
    trainer.extend(chainermn.create_multi_node_evaluator(
        extensions.Evaluator(test_iterator, model, device=device), comm))
    trainer.extend(cosine_decay(options.lr, updates),
                   trigger=(1, 'iteration'))
    if hasattr(comm, 'events'):
        trainer.extend(CommunicationReport(comm))
    if options.report and name.startswith('fp8'):
        trainer.extend(CompressionReport(comm))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(lambda trainer: print('.', end='', flush=True),
                       name='progress', trigger=(1, 'epoch'))
    trainer.extend(Snapshot(comm, retain=2))
    if options.report:
        trainer.extend(RunReport(comm))

    if found:
        iteration = resume(trainer, comm, out, damaged='aside')
        if comm.rank == 0:
            print(f'{name} goes on after iteration {iteration} ', end='',
                  flush=True)
    elif comm.rank == 0:
        print(f'{name} on {comm.size} ranks, a point per epoch ', end='',
              flush=True)
    trainer.run()
    if hasattr(comm, 'events'):
        comm.finalize()
    if comm.rank:
        return None
    chainer.serializers.save_npz(os.path.join(out, 'model.npz'), model)
    with open(os.path.join(out, 'log')) as file:
        run = summarise(name, json.load(file))
    print(f' {run["final"]:.2f} % after {run["seconds"]:.1f} s', flush=True)
    return run


def make_model(options, train_set):
    """The network, which returns its loss."""
    return L.Classifier(NETWORKS[options.network](train_set[0][0].shape[0]))


class Until:
    """A trigger that ends a run: after all epochs, or enough accuracy."""

    def __init__(self, epochs, percent, comm):
        self.epochs, self.percent, self.comm = epochs, percent, comm

    def __call__(self, trainer):
        if not trainer.updater.is_new_epoch:
            return False
        accuracy = trainer.observation.get('validation/main/accuracy', 0)
        good = self.percent is not None and 100 * accuracy >= self.percent
        return (trainer.updater.epoch >= self.epochs
                or self.comm.mpi_comm.bcast(good))

    def get_training_length(self):
        return self.epochs, 'epoch'


def prepare_directory(out, go_on):
    """Whether there is a snapshot to go on from; rank 0 decides.

    Unless the run goes on, an old run's results are moved aside.
    """
    if MPI.COMM_WORLD.rank or not os.path.isdir(out):
        return False
    if go_on:
        return bool(find_snapshots(out))
    number = 1
    while os.path.exists(f'{out}.{number}'):
        number += 1
    print(f'{out} of an earlier run is now {out}.{number}')
    os.rename(out, f'{out}.{number}')
    return False


def create_communicator(options, text, updates):
    """The communicator, with the float32 warm-up if it is an fp8 one."""
    name, given = name_and_options(text)
    if name.startswith(('fp8', 'int')):
        given.setdefault('warmup', updates // 20 if options.warmup is None
                         else options.warmup)
    return chainer_fp8pipe.create_communicator(name, **given)


def name_and_options(text):
    """A communicator's name, and its options behind a colon."""
    name, _, given = text.partition(':')
    options = {}
    for part in filter(None, given.split(',')):
        option, _, value = part.partition('=')
        options[option] = (parse_option(name, option, value)
                           if name in FAMILIES else value)
    return name, options


def cosine_decay(start, updates):
    """A learning rate that falls from ``start`` to zero."""
    def set_rate(trainer):
        done = min(trainer.updater.iteration / updates, 1.0)
        trainer.updater.get_optimizer('main').lr = (
            start * 0.5 * (1 + math.cos(math.pi * done)))
    return set_rate


def use_device(name):
    """The device of this name, which becomes the current one.

    Raises RuntimeError, with the reason, if a GPU is wanted but none is
    there.
    """
    if name != '@numpy':
        require_gpu()
    device = chainer.get_device(name)
    device.use()
    return device


def seed_random(seed):
    """Seeds all generators that Chainer draws from on the CPU."""
    random.seed(seed)
    numpy.random.seed(seed)


def main():
    options = parse()
    datasets = load_on_root(options)
    comm = chainer_fp8pipe.create_communicator('float32')
    images = datasets[1] and len(datasets[1])
    datasets = [chainermn.scatter_dataset(dataset, comm)
                for dataset in datasets]
    runs = [train(options, name, datasets) for name in options.communicator]
    if MPI.COMM_WORLD.rank == 0:
        for run in runs:
            run.update(images=images)
        print_table(runs)
        with open(os.path.join(options.out, 'summary.json'), 'w') as file:
            json.dump(runs, file, indent=1)
        if options.report:
            plot_curves(runs, os.path.join(options.out, 'curves.png'))
            write_report(options.out, [run['name'] for run in runs])


if __name__ == '__main__':
    main()
