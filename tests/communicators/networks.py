"""Models with a loss whose graphs differ in what is hard to watch."""
import chainer
import chainer.functions as F
import chainer.links as L
import numpy


class Net(chainer.Chain):
    """``loss(step, rank)`` of a batch that depends on both."""

    shape = 6, 8

    def loss(self, step, rank=0):
        generator = numpy.random.default_rng((step, rank))
        self.step = step
        x = generator.normal(0, 1, self.shape).astype('f4')
        return F.sum(self(x) ** 2) / 10


class Plain(Net):
    """Layers one after the other."""

    def __init__(self):
        super().__init__(
            l1=L.Linear(8, 16), l2=L.Linear(16, 16), l3=L.Linear(16, 16),
            l9=L.Linear(16, 16), l10=L.Linear(16, 4))

    def forward(self, x):
        for layer in (self.l1, self.l2, self.l3, self.l9):
            x = F.tanh(layer(x))
        return self.l10(x)


class Shared(Net):
    """One layer at both ends, under two names, and one used twice."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = L.Linear(8, 8)
            self.b = L.Linear(8, 8)
            self.c = self.a

    def forward(self, x):
        return self.c(F.tanh(self.b(F.tanh(self.b(F.tanh(self.a(x)))))))


class Unused(Net):
    """A layer that is never used."""

    def __init__(self):
        super().__init__(a=L.Linear(8, 8), m=L.Linear(5, 5), z=L.Linear(8, 4))

    def forward(self, x):
        return self.z(F.tanh(self.a(x)))


class Changing(Net):
    """Another way through the layers in every step."""

    def __init__(self):
        super().__init__(a=L.Linear(8, 8), b=L.Linear(8, 8), c=L.Linear(8, 8))

    def forward(self, x):
        order = (('a', 'b', 'c'), ('c', 'b', 'a'), ('b',), ('a', 'c', 'a'))
        for name in order[self.step % 4]:
            x = F.tanh(self[name](x))
        return x


class Lazy(Net):
    """Parameters that get their shape late, one of them in step 4."""

    def __init__(self):
        super().__init__(
            a=L.Linear(None, 8), b=L.Linear(None, 8), c=L.Linear(8, 3))

    def forward(self, x):
        x = F.tanh(self.a(x))
        if self.step >= 4:
            x = F.tanh(self.b(x))
        return self.c(x)


class Bare(Net):
    """Parameters outside of links' own code; two share their gradient."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.p = chainer.Parameter(numpy.ones((8, 8), 'f4'))
            self.q = chainer.Parameter(numpy.ones((8, 8), 'f4') / 2)
            self.r = chainer.Parameter(numpy.ones((8,), 'f4'))
            self.s = chainer.Parameter(numpy.ones((8,), 'f4'))

    def forward(self, x):
        h = F.matmul(x, self.p + self.q)        # one array for both
        return h * F.broadcast_to(self.r, h.shape) + F.sum(self.s)


class Forgetful(Net):
    """Its inner layer is hidden from the graph."""

    def __init__(self):
        super().__init__(inner=L.Linear(8, 8), outer=L.Linear(8, 4))

    def forward(self, x):
        return self.outer(F.forget(
            lambda h: F.tanh(self.inner(h)), chainer.Variable(x)))


class Penalty(Net):
    """The gradient of a gradient."""

    def __init__(self):
        super().__init__(a=L.Linear(8, 8), b=L.Linear(8, 4))

    def forward(self, x):
        x = chainer.Variable(x)
        y = self.b(F.tanh(self.a(x)))
        slope, = chainer.grad([F.sum(y)], [x], enable_double_backprop=True)
        return y + F.broadcast_to(F.mean(slope ** 2), y.shape)


class Mixed(Net):
    """Parameters of three dtypes."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            for name, dtype in (('h', 'f2'), ('s', 'f4'), ('d', 'f8')):
                value = numpy.linspace(-1, 1, 64).reshape(8, 8)
                setattr(self, name, chainer.Parameter(value.astype(dtype)))

    def forward(self, x):
        for parameter in (self.h, self.s, self.d):
            x = F.tanh(F.matmul(F.cast(x, 'f4'), F.cast(parameter, 'f4')))
        return x


NETWORKS = {cls.__name__: cls for cls in (
    Plain, Shared, Unused, Changing, Lazy, Bare, Forgetful, Penalty, Mixed)}
