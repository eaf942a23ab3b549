"""The command line of ``train_pipeline.py``."""
import argparse
import os

from chainer_fp8pipe.pipeline.schedules import (
    RECOMPUTE,
    SCHEDULES,
    make_schedule,
)

from models import NETWORKS
from mpi4py import MPI


def make_parser(description):
    """One group for each thing that there is to choose."""
    parser = argparse.ArgumentParser(
        description=description,
        usage='mpiexec -n RANKS python %(prog)s [options]',
        formatter_class=argparse.RawDescriptionHelpFormatter)
    network = parser.add_argument_group('network')
    network.add_argument(
        '--network', choices=NETWORKS, default='mlp',
        help='dense layers (mlp, the default) or convolutions (conv)')
    network.add_argument(
        '--depth', type=positive, metavar='N',
        help='dense layers (default: 8) or convolutions (default: 5)')
    network.add_argument(
        '--width', type=positive, metavar='N',
        help='outputs of a dense layer (default: 512) or channels of a '
        'convolution (default: 32)')
    pipeline = parser.add_argument_group('pipeline')
    pipeline.add_argument(
        '--pipeline', type=positive, metavar='D',
        default=min(2, MPI.COMM_WORLD.size),
        help='stages, a divisor of the number of ranks; the ranks are so '
        'many times as many replicas (default: 2, or 1 on a single rank)')
    pipeline.add_argument(
        '--micro-batches', type=positive, metavar='M', default=4,
        help='parts that the batch of a replica is cut into (default: 4)')
    pipeline.add_argument(
        '--schedule', choices=SCHEDULES, default='1f1b',
        help='order of the forward and backward passes (default: 1f1b)')
    pipeline.add_argument(
        '--chunks', type=positive, metavar='V',
        help='parts of the network on each rank, for --schedule interleaved '
        '(default there: 2) and zero_bubble (default there: 1)')
    pipeline.add_argument(
        '--recompute', choices=RECOMPUTE, default='no stage',
        help='which stages keep their inputs only and compute the rest a '
        'second time, to save memory (default: no stage)')
    pipeline.add_argument(
        '--balance', choices=['parameters', 'layers', 'time'],
        default='parameters',
        help='what the stages have equal shares of (default: parameters)')
    pipeline.add_argument(
        '--communicator', metavar='NAME', default='fp8',
        help='how replicas average their gradients: fp8 (the default), '
        'fp8_paper, float16, float32, or one of ChainerMN, e.g. naive; '
        'options follow a colon: fp8:period=50,warmup=20')
    training = parser.add_argument_group('training')
    training.add_argument(
        '--batchsize', type=positive, metavar='N', default=64,
        help='images per update, of all replicas together (default: 64)')
    training.add_argument(
        '--epoch', type=positive, metavar='N', default=12,
        help='passes over the training set (default: 12)')
    training.add_argument(
        '--lr', type=float, default=0.05,
        help='learning rate at the start; it falls to zero along half a '
        'cosine (default: 0.05)')
    training.add_argument(
        '--seed', type=int, default=0,
        help='of weights, batches and dropout (default: 0)')
    training.add_argument(
        '--dataset', choices=['digits', 'mnist', 'cifar10'], default='digits',
        help='digits are here; mnist and cifar10 are read from files in '
        'their original formats in --root')
    training.add_argument(
        '--root', metavar='DIR', help='where the files of mnist or cifar10 '
        'are')
    training.add_argument(
        '--device', default='@numpy', metavar='NAME',
        help='where every rank trains, as chainer.get_device names it: '
        '@cupy:0 is the first GPU, for all ranks (default: @numpy)')
    results = parser.add_argument_group('results')
    results.add_argument(
        '--out', metavar='OUT', default=os.path.join('result', 'pipeline'),
        help='directory for all results (default: result/pipeline)')
    results.add_argument(
        '--resume', action='store_true',
        help='go on from the newest snapshot in OUT, if there is one; with '
        'as many ranks or others, divided in any way')
    results.add_argument(
        '--timeline', type=positive, metavar='UPDATE',
        help='the update that is drawn to timeline.svg, and written to '
        'timeline.json as a Chrome trace (default: the last)')
    return parser


def positive(text):
    """The type of most arguments."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a whole number of at least 1')
    return int(text)


def check(options):
    """What can be said before the ranks have spoken to each other."""
    if options.chunks is None:
        options.chunks = 2 if options.schedule == 'interleaved' else 1
    make_schedule(options.schedule, options.pipeline, options.micro_batches,
                  options.chunks)
    replicas = MPI.COMM_WORLD.size // options.pipeline
    least = options.micro_batches * replicas
    if options.batchsize < least:
        raise ValueError(
            f'--batchsize {options.batchsize} is too small: '
            f'micro-batches ({options.micro_batches}) x replicas ({replicas}) '
            f'take {least} images at least')
    if options.dataset != 'digits' and not options.root:
        raise ValueError(f'--dataset {options.dataset} needs --root DIR')
    if options.dataset == 'digits' and options.root:
        raise ValueError('--root is for --dataset mnist and cifar10')
