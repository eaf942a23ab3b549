"""What the examples share: options, data of this machine, and snapshots."""
import argparse
import contextlib
import hashlib
import math
import os
import random
import sysconfig

from chainer_fp8pipe.training.extensions import (
    Snapshot,
    find_snapshots,
    resume,
)

import numpy
from chainer import training
from chainer.datasets import TupleDataset
from chainer.training import extensions
from mpi4py import MPI

RANK = MPI.COMM_WORLD.rank


def make_parser(description, name, epoch, batchsize, lr, whose='all ranks'):
    """A parser with the options that all examples have.

    Args:
        description: The example's docstring.
        name: The folder of its results, in ``result``.
        epoch: Passes over the training set.
        batchsize: Samples per update.
        lr: The highest learning rate.
        whose: Of whom these samples are: of each rank, or of all.
    """
    parser = argparse.ArgumentParser(
        description=description,
        usage='mpiexec -n RANKS python %(prog)s [options]',
        formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, kind, default, what in (
            ('epoch', count, epoch, 'N passes over the training set'),
            ('batchsize', count, batchsize,
             f'N samples per update of {whose}'),
            ('lr', float, lr, 'RATE highest learning rate'),
            ('seed', int, 0, 'N of weights and batches'),
            ('out', str, os.path.join('result', name),
             'OUT folder for results')):
        metavar, what = what.split(' ', 1)
        parser.add_argument(f'--{option}', type=kind, default=default,
                            metavar=metavar,
                            help=f'{what} (default: {default})')
    parser.add_argument('--resume', action='store_true',
                        help='go on from the newest snapshot in OUT')
    return parser


def add_counts(parser, *options):
    """Adds options of an example's own: (name, default, what it counts)."""
    for name, default, what in options:
        parser.add_argument(f'--{name}', type=count, default=default,
                            metavar='N', help=f'{what} (default: {default})')


def count(text):
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a whole number of at least 1')
    return int(text)


def parse(parser):
    """The options; help and errors are printed by rank 0 alone."""
    with contextlib.ExitStack() as stack:
        if RANK:
            nowhere = stack.enter_context(open(os.devnull, 'w'))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        return parser.parse_args()


def say(text):
    """Prints on rank 0."""
    if RANK == 0:
        print(text, flush=True)


def seed_random(seed):
    """Seeds what Chainer draws weights, batches and dropout from."""
    random.seed(seed)
    numpy.random.seed(seed)


def follow_cosine(highest, updates, name='lr', rise=0.0):
    """An extension: a rate that rises for a share of the updates, then falls.

    It falls along half a cosine, to zero after the last update.
    """
    up = rise * updates

    def set_rate(trainer):
        done = trainer.updater.iteration
        setattr(trainer.updater.get_optimizer('main'), name, highest * (
            (done + 1) / up if done < up else
            (1 + math.cos(math.pi * (done - up) / (updates - up))) / 2))
    set_rate.initialize = set_rate      # before the first update, too
    return set_rate


def run(trainer, comm, options, values):
    """Trains, with a line per epoch and snapshots of all ranks.

    Args:
        trainer: Of this rank.
        comm: The ranks.
        options: Of the command line.
        values: Names of what a line shows of Chainer's log.
    """
    def show(trainer):
        entry = trainer.get_extension('LogReport').log[-1]
        print(f'epoch {entry["epoch"]}: ' + ', '.join(
            f'{name} {entry[name]:.4g}' for name in values if name in entry)
            + f' ({entry["elapsed_time"]:.1f} s)', flush=True)
    if RANK == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(show, trigger=(1, 'epoch'),
                       priority=training.PRIORITY_READER - 1)
    trainer.extend(Snapshot(comm, retain=2))
    if options.resume and find_snapshots(options.out):
        start = resume(trainer, comm, options.out, damaged='aside')
        say(f'goes on after iteration {start}')
    trainer.run()


def digits():
    """Training and test set: images (1, 8, 8), float32, and labels, int32.

    They are scikit-learn's 1,797 digits, a third of them for the test:
    E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI
    Machine Learning Repository (1998), CC BY 4.0.
    """
    path = os.path.join(os.path.dirname(__file__), 'digits.npz')
    with numpy.load(path) as file:
        return [TupleDataset((file[part] / 16).astype(numpy.float32),
                             file[f'{part}_labels'].astype(numpy.int32))
                for part in ('train', 'test')]


#: What is no text for humans, differs between machines, or is repeated.
_SKIPPED = {'test', 'tests', 'idlelib', 'lib2to3', 'encodings', 'pydoc_data',
            'site-packages', 'dist-packages', 'ensurepip', '__pycache__'}


def texts(size, length):
    """Python's standard library: pieces for training and for validation.

    A token is a byte.  Which files come, and in what order, depends on their
    names alone.

    Args:
        size: Bytes of both sets; a tenth is for validation.
        length: Bytes of a piece.

    Returns:
        Two data sets of pairs: int32 array of bytes, and of those that
        follow each of them.
    """
    root = sysconfig.get_path('stdlib')
    sides = [], []
    for name in sorted(_sources(root), key=_number):
        sides[_number(name) % 10 == 0].append(os.path.join(root, name))
    return [_pieces(_read(paths, share), length) for paths, share in zip(
        sides, (size - size // 10, size // 10), strict=True)]


def _sources(root):
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED
                      and not name.startswith('config-')]
        for file in files:
            if file.endswith('.py') and not file.startswith('_sysconfigdata'):
                path = os.path.relpath(os.path.join(folder, file), root)
                yield path.replace(os.sep, '/')


def _number(name):
    """A large number that depends on the name, but not on the machine."""
    return int.from_bytes(hashlib.blake2b(name.encode()).digest(), 'big')


def _read(paths, size):
    text = bytearray()
    for path in paths:
        if len(text) >= size:
            break
        with open(path, 'rb') as file:
            text += file.read()
    return text[:size]


def _pieces(text, length):
    tokens = numpy.frombuffer(text, numpy.uint8).astype(numpy.int32)
    number = (len(tokens) - 1) // length
    return TupleDataset(tokens[:number * length].reshape(-1, length),
                        tokens[1:number * length + 1].reshape(-1, length))
