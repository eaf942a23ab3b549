"""The command line of ``train_imagenet.py``."""
import argparse
import os
import re

from models import NETWORKS


def make_parser(description):
    """One group for each thing that there is to choose."""
    parser = argparse.ArgumentParser(
        description=description,
        usage='mpiexec -n RANKS python %(prog)s ROOT [options]',
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'root', metavar='ROOT',
        help='where train/CLASS/*.JPEG and val/CLASS/*.JPEG are')
    _network(parser.add_argument_group('network'))
    _ranks(parser.add_argument_group('ranks'))
    _recipe(parser.add_argument_group('recipe'))
    _input(parser.add_argument_group('input'))
    _results(parser.add_argument_group('results'))
    return parser


def _network(group):
    group.add_argument(
        '--arch', choices=NETWORKS, default='resnet50',
        help='network (default: resnet50); small is for trying things on a '
        'CPU')
    sizes = ', '.join(f'{network.insize} for {name}'
                      for name, network in NETWORKS.items())
    group.add_argument(
        '--insize', type=positive, metavar='PIXELS',
        help=f'height and width of the images it sees (default: {sizes})')
    group.add_argument(
        '--zero-gamma', action=argparse.BooleanOptionalAction, default=True,
        help='whether each block of resnet50 starts as the identity '
        '(default: yes)')
    group.add_argument(
        '--mixed-precision', action='store_true',
        help='layers in float16, with dynamic loss scaling; batch '
        'normalisation, loss and updates in float32')
    group.add_argument(
        '--gpu', action='store_true',
        help='on GPUs: the first rank of a node takes GPU 0, and so on')


def _ranks(group):
    group.add_argument(
        '--communicator', metavar='NAME', default='fp8',
        help='how ranks average gradients: fp8 (the default), fp8_paper, '
        'float16, float32, torus2d, or one of ChainerMN, e.g. naive; options '
        'follow a colon: fp8:overlap=true,warmup=500,algorithm=ring')
    group.add_argument(
        '--group-bn', type=positive, metavar='RANKS', default=1,
        help='so many consecutive ranks share the statistics of batch '
        'normalisation (default: 1)')
    group.add_argument(
        '--bn-tile', type=tile, metavar='RxC',
        help='tiles of R x C ranks do, of the torus that --communicator '
        'torus2d takes (default: --group-bn)')


def _recipe(group):
    group.add_argument(
        '--batchsize', type=positive, metavar='N', default=32,
        help='images per rank and update (default: 32)')
    group.add_argument(
        '--epoch', type=positive, metavar='N', default=90,
        help='passes over the training set (default: 90)')
    group.add_argument(
        '--lr', type=float, metavar='RATE', default=0.1,
        help='learning rate for --base-batch; that of all ranks together '
        'grows or shrinks with their images per update (default: 0.1)')
    group.add_argument(
        '--base-batch', type=positive, metavar='N', default=256,
        help='images per update that --lr is for (default: 256)')
    group.add_argument(
        '--warmup', type=float, metavar='EPOCHS',
        help='how long the rate rises from --lr, a little at every update '
        '(default: 5, or a quarter of a training of fewer than 20)')
    group.add_argument(
        '--decay', choices=['polynomial', 'step', 'constant'],
        default='polynomial',
        help='of the rate, after the warm-up (default: polynomial)')
    group.add_argument(
        '--lars', action=argparse.BooleanOptionalAction, default=True,
        help='layer-wise adaptive rate scaling (default: yes)')
    group.add_argument(
        '--weight-decay', type=float, metavar='DECAY', default=1e-4,
        help='of weights, not of biases and normalisations (default: 1e-4)')
    group.add_argument(
        '--label-smoothing', type=float, metavar='SHARE', default=0.1,
        help='of a label that goes to all classes (default: 0.1)')
    group.add_argument(
        '--average', type=float, metavar='DECAY', default=0.99,
        help='evaluate with weights averaged over some 1 / (1 - DECAY) '
        'updates; 0: with the weights as they are (default: 0.99)')
    group.add_argument(
        '--seed', type=int, default=0,
        help='of weights, order of images, crops and dropout (default: 0)')


def _input(group):
    group.add_argument(
        '--workers', type=positive, metavar='N', default=4,
        help='threads per rank that read and decode (default: 4)')
    group.add_argument(
        '--prefetch', type=count, metavar='BATCHES', default=8,
        help='batches that they are ahead (default: 8)')
    group.add_argument(
        '--cache', choices=['memory', 'none'], default='memory',
        help="what stays in memory, once per node: the files' bytes "
        '(memory, the default), or nothing')
    group.add_argument(
        '--cache-bytes', type=size, metavar='BYTES',
        help='how much, e.g. 150G (default: half of the memory that a node '
        'has left)')
    group.add_argument(
        '--decoder', metavar='NAME', default='auto',
        help='turbojpeg or pillow (default: auto, the fastest that is there)')
    group.add_argument(
        '--on-error', choices=['skip', 'raise'], default='skip',
        help='an image that cannot be used is left out and named (skip, the '
        'default), or ends the training')


def _results(group):
    out = os.path.join('result', 'imagenet')
    group.add_argument(
        '--out', metavar='OUT', default=out,
        help=f'directory for all results (default: {out})')
    group.add_argument(
        '--resume', action='store_true',
        help='go on from the newest snapshot in OUT, if there is one')
    group.add_argument(
        '--snapshot', type=positive, metavar='UPDATES',
        help='between snapshots (default: an epoch); the last two are kept')
    group.add_argument(
        '--log', type=positive, metavar='UPDATES',
        help='between lines of the log (default: an epoch)')


def count(text):
    """A whole number."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number')
    return int(text)


def positive(text):
    """A whole number, but 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a whole number of at least 1')
    return int(text)


def tile(text):
    """Rows and columns."""
    match = re.fullmatch(r'(\d+)x(\d+)', text)
    if not match:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not rows and columns, like 2x2')
    return int(match[1]), int(match[2])


def size(text):
    """Bytes, or thousands, millions or thousands of millions of them."""
    match = re.fullmatch(r'(\d+)([kMG]?)', text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(
            f'{text!r} is no number of bytes, like 500M or 150G')
    return int(match[1]) * {'': 1, 'k': 10 ** 3, 'M': 10 ** 6,
                            'G': 10 ** 9}[match[2]]


def check(options):
    """What can be said before the ranks have spoken to each other."""
    if options.bn_tile and options.group_bn > 1:
        raise ValueError('--group-bn and --bn-tile are two ways to make '
                         'groups; give one of them')
    if not 0 <= options.average < 1:
        raise ValueError(f'--average {options.average} must be at least 0 '
                         'and less than 1')
    if not 0 <= options.label_smoothing < 1:
        raise ValueError(f'--label-smoothing {options.label_smoothing} must '
                         'be at least 0 and less than 1')
    if options.cache_bytes and options.cache == 'none':
        raise ValueError('--cache-bytes is of no use with --cache none')
    if options.warmup is None:
        options.warmup = min(5, options.epoch / 4)
