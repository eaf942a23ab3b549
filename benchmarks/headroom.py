"""How much room the fp8 codec should leave above the quantile.

    .venv/bin/python benchmarks/headroom.py

trains the digits network on one rank in float32 and lets an fp8 codec for
each headroom encode and decode the gradients on the side.  Scales are chosen
once per period, as in training, so that they age as gradients change.
"""
import argparse
import os
import statistics
import sys

from chainer_fp8pipe.codecs import Fp8Ratio, Tensors

import chainer
import chainer.links as L
import numpy
from codec_updates import begin
from environment import describe, write_json

sys.path.insert(0, os.path.join(os.path.dirname(__file__), os.pardir,
                                'examples', 'digits'))


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--updates', type=int, default=400,
                        help='of training (default: 400)')
    parser.add_argument('--powers', type=int, nargs='+',
                        default=[0, 2, 4, 6, 8, 10, 12, 14, 16, 18],
                        help='headrooms to try, as powers of two')
    parser.add_argument('--json', metavar='FILE',
                        help='write the raw data to FILE')
    return parser.parse_args()


def gradients(updates):
    """Trains serially; yields the gradients of every update."""
    from data import load
    from model import ConvNet
    numpy.random.seed(0)
    train, _ = load('digits')
    model = L.Classifier(ConvNet(1))
    optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
    iterator = chainer.iterators.SerialIterator(train, 32)
    for _ in range(updates):
        images, labels = chainer.dataset.concat_examples(iterator.next())
        loss = model(images, labels)
        model.cleargrads()
        loss.backward()
        parameters = sorted(model.namedparams())
        yield Tensors(
            [name for name, _ in parameters],
            [numpy.array(p.grad, 'f4').reshape(-1) for _, p in parameters],
            [p.array.reshape(-1) for _, p in parameters])
        optimizer.update()


def round_trip(codec, tensors):
    """Relative error of all gradients after encode and decode."""
    wire = numpy.empty(tensors.size, codec.wire_dtype)
    begin(codec, tensors)
    codec.encode(tensors, wire)
    decoded = Tensors(tensors.names,
                      [gradient.copy() for gradient in tensors.gradients],
                      tensors.parameters)
    codec.decode(decoded, wire)
    before = numpy.concatenate(tensors.gradients)
    after = numpy.concatenate(decoded.gradients)
    return float(numpy.linalg.norm(after - before)
                 / numpy.linalg.norm(before))


def main():
    options = parse()
    print(describe())
    codecs = {power: Fp8Ratio(headroom=2.0 ** power, error_feedback=False)
              for power in options.powers}
    errors = {power: [] for power in codecs}
    for tensors in gradients(options.updates):
        for power, codec in codecs.items():
            errors[power].append(round_trip(codec, tensors))
    print(f'\n{"headroom":>9}{"relative error of a round trip":>36}'
          f'{"clipped":>12}')
    print(f'{"":9}{"median":>12}{"90 %":>12}{"worst":>12}{"[%]":>12}')
    data = {}
    for power, codec in codecs.items():
        report = codec.report().values()
        clipped = 100 * (sum(tensor.clipped for tensor in report)
                         / sum(tensor.encoded for tensor in report))
        worst = sorted(errors[power])
        print(f'{"2^" + str(power):>9}{statistics.median(worst):12.4f}'
              f'{worst[int(0.9 * len(worst))]:12.4f}{worst[-1]:12.4f}'
              f'{clipped:12.4f}')
        data[f'2^{power}'] = {'errors': errors[power], 'clipped': clipped}
    if options.json:
        write_json(options.json, {'headroom': data})


if __name__ == '__main__':
    main()
