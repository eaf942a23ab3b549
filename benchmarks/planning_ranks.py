"""What the ranks of the planning benchmark do: started by mpiexec.

Plans a job, and then runs every way that was tried again, in turns and for
longer, with the same data; among them the script as it was.
"""
from __future__ import annotations

import contextlib
import os
import statistics
import time

from chainer_fp8pipe.planner import plan as planning
from chainer_fp8pipe.planner.example import Data, Endless, Example
from chainer_fp8pipe.planner.job_plan import Way
from chainer_fp8pipe.planner.trials import Trained, try_way

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from environment import as_rank


class Convolutions(chainer.Chain):
    """A small network for images of 32 x 32 pixels, as for CIFAR."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 16, 3, pad=1)
            self.conv2 = L.Convolution2D(16, 32, 3, pad=1)
            self.fc1 = L.Linear(32 * 64, 256)
            self.fc2 = L.Linear(256, 10)

    def forward(self, x, t):
        h = x.reshape(len(x), 3, 32, 32)
        for layer in self.conv1, self.conv2:
            h = F.max_pooling_2d(F.relu(layer(h)), 2)
        return F.softmax_cross_entropy(self.fc2(F.relu(self.fc1(h))), t)


class Recurrent(chainer.Chain):
    """An LSTM over 24 slices of a sample."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.lstm = L.NStepLSTM(2, 128, 256, 0.0)
            self.fc = L.Linear(256, 10)

    def forward(self, x, t):
        rows = [row.reshape(24, 128) for row in x]
        hidden, _, _ = self.lstm(None, None, rows)
        return F.softmax_cross_entropy(self.fc(hidden[-1]), t)


def _perceptron(units, layers):
    def make():
        parts = []
        for _ in range(layers):
            parts += [L.Linear(None, units), F.relu]
        return L.Classifier(chainer.Sequential(*parts, L.Linear(None, 10)))
    return make


#: Model, elements of a sample, samples of a rank.
MODELS = {'mlp': (_perceptron(1024, 4), 3072, 32),
          'wide': (_perceptron(2048, 3), 3072, 8),
          'convolutions': (Convolutions, 3072, 16),
          'recurrent': (Recurrent, 3072, 8)}


class Samples(chainer.dataset.DatasetMixin):
    """Made up; some milliseconds pass until a sample is read."""

    def __init__(self, elements, seconds):
        self._x = numpy.random.RandomState(0).rand(elements).astype('f')
        self._seconds = seconds

    def __len__(self):
        return 10_000

    def get_example(self, i):
        time.sleep(self._seconds)
        return self._x, numpy.int32(i % 10)


def main(comm, job):
    if job['pinned']:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    make, elements, samples = MODELS[job['model']]
    model, batch = make(), samples * comm.size
    iterator = chainer.iterators.SerialIterator(
        Samples(elements, job['reading']), batch)
    example = chainer.dataset.concat_examples(
        [iterator.dataset[number] for number in range(samples)])
    model(*example)                         # all parameters have values
    optimizer = chainer.optimizers.Adam().setup(model)
    data = Data(Endless(iterator), chainer.dataset.concat_examples, True)
    ways = {}

    def recording(way, *given):
        ways[str(way)] = way
        return try_way(way, *given)
    planning.try_way = recording
    with Slow() if comm.rank == job['slow'] else contextlib.nullcontext():
        begin = time.perf_counter()
        made = planning.plan(model, example, comm, batch=batch, data=data,
                             optimizer=optimizer, budget=job['budget'],
                             as_it_is=Way())
        took = time.perf_counter() - begin
        trained = Trained(model, optimizer, Example(example), batch, data)
        found = {}
        for _ in range(job['turns']):
            for name, way in ways.items():
                blocks = try_way(way, trained, comm, job['seconds'])
                found.setdefault(name, []).extend(blocks.seconds)
    return {**job, 'planning': took, 'choice': str(made.choice),
            'remarks': made.remarks,
            'ways': {name: statistics.median(seconds)
                     for name, seconds in found.items() if seconds}}


class Slow(chainer.FunctionHook):
    """Makes a rank take twice as long, as if on a slower processor."""

    name = 'slow'
    _owed = 0.0

    def forward_preprocess(self, function, in_data):
        self._begin = time.perf_counter()

    def forward_postprocess(self, function, in_data):
        self._owed += time.perf_counter() - self._begin
        if self._owed > 1e-3:       # less is not kept exactly
            begin = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - begin

    backward_preprocess, backward_postprocess = (
        lambda self, function, in_data, out_grad:
        self.forward_preprocess(function, in_data),
        lambda self, function, in_data, out_grad:
        self.forward_postprocess(function, in_data))


if __name__ == '__main__':
    as_rank(main)
