"""Numbers that Python makes of computed values, in the model's own forward."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from tests.models.judge import Both, plan_of
from tests.ranks import on_ranks


def grown(number):
    number += 1
    number *= 2
    return number


#: What is computed of h as a whole, each with one number.
RIGHT = {
    'mean': lambda h: h * h.array.mean(),
    'norm': lambda h: h / numpy.linalg.norm(h.array),
    'at a place': lambda h: h * h.array[0, 1],
    'position': lambda h: h + h.array.argmax(),
    'of numbers': lambda h: h * (numpy.sqrt(h.array.var()) - 2) ** 2,
    'in place': lambda h: h * grown(h.array.mean()),
    'exponent': lambda h: F.sigmoid(h) ** h.array.var(),
    'methods': lambda h: h * h.array.sum().astype('d').clip(-1, 1),
    'counted': lambda h: h * numpy.count_nonzero(h.array > 0),
    'compared': lambda h: h * (h.array.mean() > -5),
    'a number or not': lambda h: h * (
        h.array.mean() if numpy.isscalar(h.array.mean()) else 7.),
    'of no dimension': lambda h: h * F.mean(h).array,
    'shape': lambda h: h * len(h.array) / h.array.ndim}


class Net(chainer.Chain):
    def __init__(self, between):
        super().__init__()
        numpy.random.seed(1)
        self.between = between
        with self.init_scope():
            self.a, self.b = L.Linear(4, 5), L.Linear(5, 3)
            self.c = L.Linear(3, 3)

    def forward(self, x, t):
        h = F.tanh(self.b(self.between(F.tanh(self.a(x)))))
        return F.softmax_cross_entropy(self.c(h), t)


PLAN = plan_of([['/a/W', '/a/b'], ['/b/W', '/b/b'], ['/c/W', '/c/b']],
               '/b/W')
BATCH = (numpy.random.RandomState(0).randn(8, 4).astype('f'),
         numpy.arange(8, dtype='i') % 3)


@pytest.mark.parametrize('later', [0, 1])
@on_ranks(2)
def test_numbers_are_those_of_one_process(comm, later):
    """Computed on either side of the cut."""
    plan = {**PLAN, 'cuts': [[1, 0] if later else [0, 1]]}
    for between in RIGHT.values():
        Both(comm, Net(between), BATCH, plan=plan, tolerance=1e-5).update()
