"""One rank of a pipeline: what it computes, keeps and refuses."""
import itertools
import weakref

from chainer_fp8pipe.pipeline.channel import Channels
from chainer_fp8pipe.pipeline.layers import LayerError, LayersPart
from chainer_fp8pipe.pipeline.randomness import Place
from chainer_fp8pipe.pipeline.schedules import make_schedule
from chainer_fp8pipe.pipeline.stage import Stage
from chainer_fp8pipe.report.stream import EventStream

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from mpi4py import MPI

PLACE = Place(0, 0, 0, 0)
X = numpy.random.RandomState(0).randn(20, 8).astype('f')


def part(*layers):
    return LayersPart(list(enumerate(layers)))


def step(layers, cut=(), schedule='zero_bubble', recomputed=(), sums=None):
    """A step of 4 micro-batches, in chunks that begin where ``cut`` says."""
    ends = (0, *cut, len(layers))
    numbered = list(enumerate(layers))
    parts = [LayersPart(numbered[start:end])
             for start, end in itertools.pairwise(ends)]
    parts[-1].loss = lambda calls, micro_batch, y: (F.mean(y[0] ** 2),)
    last = len(cut)
    stage = Stage(Channels(MPI.COMM_SELF, last), last,
                  frozenset(recomputed), EventStream(),
                  dict(enumerate(parts)))
    stage.sums = sums or stage.sums
    stage.run(make_schedule(schedule, 1, 4, last + 1),
              [(X[start:start + 5],) for start in range(0, 20, 5)],
              [Place(0, 0, 0, start) for start in range(0, 20, 5)],
              lambda: [.25] * 4, train=True)
    stage.finish(None)


class Scale(chainer.Link):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(numpy.ones(8, 'f'))

    def forward(self, x):
        return x * F.broadcast_to(self.w, x.shape)


class Own(Scale):
    """Draws, counts and keeps a mean of its own, and makes links late."""

    def __init__(self):
        super().__init__()
        self.generator, self.calls = numpy.random.default_rng(3), 0
        self.add_persistent('mean', numpy.zeros(8, 'f'))
        self.add_persistent('var', numpy.ones(8, 'f'))

    def forward(self, x):
        self.calls += 1
        if self.calls == 1:
            with self.init_scope():
                self.late = chainer.Parameter(numpy.ones(8, 'f'))
        mask = (self.generator.random(8) > .5 + self.calls / 99).astype('f')
        h = super().forward(x * mask) + F.broadcast_to(self.late, x.shape)
        one = numpy.ones(8, 'f')
        return F.batch_normalization(h, one, one, running_mean=self.mean,
                                     running_var=self.var)


class Old(chainer.Function):
    """An old-style function that draws."""

    def forward(self, inputs):
        self.mask = (numpy.random.rand(*inputs[0].shape) > .5).astype('f')
        return inputs[0] * self.mask,

    def backward(self, inputs, gradients):
        return gradients[0] * self.mask,


def half_kept(x):
    """Draws by functions and by itself, and keeps a value from backward."""
    kept = F.tanh(x)
    kept.unchain()
    mask = (numpy.random.rand(*x.shape) > .3).astype('f')
    return F.dropout(x) * mask + F.dropout(x, .2) * kept


def looked_at(x):
    return x * 2 if float(x.array.sum()) > 0 else (x, x.array > 0)[0]


def spectral():
    numpy.random.seed(2)
    return L.Linear(8, 8).add_hook(chainer.link_hooks.SpectralNormalization())


class Frozen(chainer.Chain):
    """Has no gradient through a part of it."""

    def __init__(self):
        super().__init__(inner=L.Linear(8, 8, initialW=.5 * numpy.eye(8)))

    def forward(self, x):
        with chainer.no_backprop_mode():
            y = self.inner(x)
        return x + y


def unlike_training(x):
    with chainer.using_config('train', False):
        return F.rrelu(x)


#: What is run again, made anew for each training.
AGAIN = {
    'dropout': lambda: F.dropout, 'a mask': lambda: half_kept,
    'an old-style function': lambda: lambda x: Old()(x),
    'rrelu': lambda: lambda x: F.rrelu(x),
    'forgotten': lambda: lambda x: F.forget(F.dropout, x),
    'a generator nobody finds': lambda: (lambda g: lambda x: x * (
        g.random(x.shape) > .5).astype('f'))(numpy.random.default_rng(0)),
    'a counter': lambda: (lambda c: lambda x: x * next(c))(
        itertools.count(1)),
    'a branch': lambda: looked_at,
    'a link that draws and keeps': Own,
    'several values': lambda: chainer.Sequential(
        lambda x: (x, x.array > 0, F.sin(x)), lambda x, up, y: F.where(
            up, x, y)),
    'batch normalisation': lambda: L.BatchNormalization(8),
    'batch renormalisation': lambda: L.BatchRenormalization(8),
    'spectral normalisation': spectral,
    'no graph': Frozen,
    'a setting': lambda: unlike_training,
    'nothing': lambda: lambda x: x,
}


@pytest.mark.parametrize('name', AGAIN)
def test_recomputation_changes_no_bit(name):
    found = []
    for recomputed in ((), (0, 1), (0,)):
        first, again, middle, last = (
            L.Linear(8, 8, initialW=numpy.eye(8)), AGAIN[name](),
            L.BatchNormalization(8), L.Linear(8, 3, initialW=1))
        step([first, again, middle, F.tanh, last], cut=(3,),
             recomputed=recomputed)
        links = [one for one in (first, again, middle, last)
                 if isinstance(one, chainer.Link)]
        found.append([None if array is None else array.tobytes()
                      for link in links for one in link.links()
                      for array in [
                          *[p.grad for p in one.params()],
                          *[getattr(one, name) for name in one._persistent]]
                      if array is None or hasattr(array, 'tobytes')])
    assert found[0] == found[1] == found[2]


def test_a_variable_that_goes_round_the_layers_is_an_error():
    kept = []

    def keep(x):
        kept.append(F.tanh(x))
        return kept[0] * 2
    for recomputed in (), (1,):
        kept.clear()
        with pytest.raises(LayerError, match='hand it on from layer to layer'):
            step([L.Linear(8, 8), keep, lambda x: x + kept[0]], cut=(2,),
                 recomputed=recomputed)


def test_only_what_functions_retain_is_kept():
    made = []

    def spy(h):
        made.append(weakref.ref(h.array))
        return h
    tape, _ = part(L.Linear(8, 8), spy, F.relu, spy, L.Linear(8, 3)).record(
        0, (X,), PLACE)
    linear, relu = made
    assert linear() is None
    assert relu() is not None
    del tape
    assert relu() is None
