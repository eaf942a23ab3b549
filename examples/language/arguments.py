"""The command line of ``train_language.py``."""
import argparse
import os
import re

from chainer_fp8pipe.pipeline.schedules import SCHEDULES

from models import MODELS
from mpi4py import MPI

#: What is not given, and the same with --small.
SIZES = {'units': (512, 128), 'layers': (8, 4), 'heads': (8, 4),
         'length': (64, 32), 'vocabulary': (1024, 512),
         'characters': (2_000_000, 500_000), 'batchsize': (8, 16),
         'iterations': (200, 100), 'lr': (1e-3, 3e-3)}


def make_parser(description):
    """One group for each thing that there is to choose."""
    parser = argparse.ArgumentParser(
        description=description,
        usage='[mpiexec -n RANKS] python %(prog)s [options]',
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--small', action='store_true',
        help='a small model for a short time: the second of two defaults; '
        'one minute for 4 ranks on 2 cores')
    _model(parser.add_argument_group('model'))
    _pipeline(parser.add_argument_group('pipeline'))
    _training(parser.add_argument_group('training'))
    _results(parser.add_argument_group('results'))
    return parser


def _model(group):
    group.add_argument(
        '--model', choices=MODELS, default='decoder',
        help='a transformer (decoder, the default) or layers of LSTM (lstm)')
    _sized(group, 'units', positive, 'width of all layers')
    _sized(group, 'layers', positive, 'blocks of the decoder, or layers of '
           'LSTM')
    _sized(group, 'heads', positive, 'of an attention of the decoder; --units '
           'is a multiple')
    group.add_argument(
        '--dropout', type=share, metavar='SHARE', default=0.0,
        help='of the units, left out at random in training (default: 0)')
    _sized(group, 'vocabulary', vocabulary, 'tokens, which are byte pairs '
           'learned from the text; 0: bytes')
    _sized(group, 'length', positive, 'tokens that the model sees at once')


def _pipeline(group):
    group.add_argument(
        '--pipeline', type=positive, metavar='STAGES',
        default=MPI.COMM_WORLD.size,
        help='a divisor of the number of ranks; the ranks are so many times '
        'as many replicas (default: all ranks are stages of one)')
    group.add_argument(
        '--memory', type=memory, metavar='SIZE',
        help='that a rank has for parameters, gradients, the optimizer and '
        'what backward needs, such as 150MB or 1.5GB (default: no limit)')
    group.add_argument(
        '--fill', action='store_true',
        help='as many layers, in place of --layers, as all ranks together '
        'have --memory for')
    group.add_argument(
        '--micro-batches', type=positive, metavar='M', default=8,
        help='parts that the batch of a replica is cut into (default: 8)')
    group.add_argument(
        '--schedule', choices=SCHEDULES, default='1f1b',
        help='order of the forward and backward passes (default: 1f1b)')
    group.add_argument(
        '--communicator', metavar='NAME', default='fp8',
        help='how replicas average their gradients: fp8 (the default), '
        'fp8_paper, float16, float32, or one of ChainerMN, e.g. naive; '
        'options follow a colon: fp8:period=50,warmup=20')


def _training(group):
    _sized(group, 'batchsize', positive, 'texts of --length per update, of '
           'all replicas together')
    length = group.add_mutually_exclusive_group()
    _sized(length, 'iterations', positive, 'number of updates')
    length.add_argument('--epoch', type=positive, metavar='N',
                        help='passes over the text, instead')
    _sized(group, 'lr', float, "Adam's alpha at its highest, after a tenth "
           'of all updates; from there it falls to zero along half a cosine')
    _sized(group, 'characters', positive, "of the text, the sources of "
           "Python's standard library; a tenth of them for validation")
    group.add_argument(
        '--seed', type=int, default=0,
        help='of weights, batches and dropout (default: 0)')


def _results(group):
    out = os.path.join('result', 'language')
    group.add_argument(
        '--out', metavar='OUT', default=out,
        help=f'directory for all results (default: {out})')
    group.add_argument(
        '--log', type=positive, metavar='UPDATES',
        help='between lines of the log, each with a validation and a '
        'snapshot (default: a tenth of all updates)')
    group.add_argument(
        '--resume', action='store_true',
        help='go on from the newest snapshot in OUT, if there is one')


def _sized(group, name, kind, text):
    default, small = SIZES[name]
    group.add_argument(f'--{name}', type=kind, metavar='N',
                       help=f'{text} (default: {default:,}, {small:,})')


def positive(text):
    """The type of most arguments."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a whole number of at least 1')
    return int(text)


def vocabulary(text):
    """Bytes alone, or some tokens more."""
    if text.isdecimal() and (int(text) == 0 or int(text) > 256):
        return int(text)
    raise argparse.ArgumentTypeError(
        f'{text!r} is not a whole number above 256 (there are 256 bytes), '
        'or 0')


def share(text):
    """A part of a whole, but not all of it."""
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a number of at least 0 and less than 1')
    return number


def memory(text):
    """A size with its unit, the way that ``partition`` takes it."""
    match = re.fullmatch(r'(\d+(?:\.\d+)?) ?([kMGT]?B)', text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f'{text!r} is no amount of memory, like 150MB or 1.5GB')
    return f'{match[1]} {match[2]}'


def check(options):
    """Adds the defaults; says what is wrong before ranks speak to others."""
    for name, sizes in SIZES.items():
        if getattr(options, name) is None:
            setattr(options, name, sizes[options.small])
    if options.model == 'decoder' and options.units % options.heads:
        raise ValueError(f'--units {options.units} is not a multiple of '
                         f'--heads {options.heads}')
    if options.fill and not options.memory:
        raise ValueError('--fill needs --memory SIZE')
    ranks = MPI.COMM_WORLD.size
    if ranks == 1:
        if options.memory:
            raise ValueError('--memory is for a model that is divided over '
                             'ranks: mpiexec -n RANKS python ...')
        return
    replicas = max(1, ranks // options.pipeline)
    parts = options.micro_batches * replicas
    if options.batchsize % parts:
        raise ValueError(
            f'--batchsize {options.batchsize} is not a multiple of {parts}: '
            f'micro-batches ({options.micro_batches}) x replicas '
            f'({replicas})')
