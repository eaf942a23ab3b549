"""What the ranks of the planning benchmark do: started by mpiexec.

    python planning_ranks.py JOB.json RESULT.json

Plans a job, and then runs every way that was tried again, in turns and for
longer, with the same data; among them the script as it was.
"""
from __future__ import annotations

import json
import os
import statistics
import sys
import time

from chainer_fp8pipe.planner import trials
from chainer_fp8pipe.planner.example import Data, Endless, Example
from chainer_fp8pipe.planner.plan import plan
from chainer_fp8pipe.planning.job_plan import Configuration

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from mpi4py import MPI

#: Turns in which every way is run, and seconds of a way in each.
_TURNS, _SECONDS = 3, 1.5


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


def main(job, result):
    with open(job) as file:
        job = json.load(file)
    comm = MPI.COMM_WORLD
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
    if comm.rank == job['slow']:
        _slow_down(model)
    optimizer = chainer.optimizers.Adam().setup(model)
    data = Data(Endless(iterator), chainer.dataset.concat_examples, True)
    begin = time.perf_counter()
    made = plan(model, example, comm, batch=batch, optimizer=optimizer,
                data=data).plan
    planning = time.perf_counter() - begin
    trained = trials.Trained(model, optimizer, Example(example), batch, data)
    found = _again(comm, made, trained)
    if comm.rank == 0:
        with open(result, 'w') as file:
            json.dump({**job, 'planning': planning,
                       'choice': str(made.choice), 'ways': {
                           way: statistics.median(seconds)
                           for way, seconds in found.items()}}, file)


def _again(comm, made, trained):
    """Seconds of every way that was tried, by name."""
    found = {}
    for _ in range(_TURNS):
        for one in made.trials:
            way = _way_of(one.way, made, comm.size)
            if way is None:
                continue
            seconds = trials.try_way(way, trained, comm, _SECONDS)
            if not isinstance(seconds, str):
                found.setdefault(one.way, []).extend(seconds)
    return found


def _way_of(said, made, ranks):
    """The way that a plan calls so; None: a pipeline that was not chosen."""
    for way in made.choice, Configuration():
        if said == str(way):
            return way
    for codec in 'float32', 'float16', 'fp8', 'naive':
        for algorithm in 'direct', 'ring', 'torus2d':
            for overlap in False, True, 'next_forward':
                way = Configuration(ranks, codec=codec, algorithm=algorithm,
                                    overlap=overlap)
                if str(way) == said:
                    return way
    return None


def _slow_down(model):
    """Makes a pass on this rank take twice as long."""
    kind = type(model)
    forward = kind.forward

    def slow(self, *args, **kwargs):
        with chainer.no_backprop_mode():
            forward(self, *args, **kwargs)
            forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)
    kind.forward = slow


if __name__ == '__main__':
    main(*sys.argv[1:])
