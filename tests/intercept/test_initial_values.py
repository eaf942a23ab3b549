"""Somebody else may give parameters their values, in one thread only."""
import threading

from chainer_fp8pipe.intercept.initial_values import Creation, creating

import chainer
import chainer.links as L
import numpy
import pytest


class Noting(Creation):
    """Notes what it is asked."""

    def __init__(self, creates=False, initializes=False):
        self.creates, self._initializes = creates, initializes
        self.made, self.shaped = [], []

    def created(self, parameter, shape):
        self.made.append(shape)

    def initialize(self, parameter, shape):
        self.shaped.append(shape)
        return self._initializes


def methods():
    return vars(chainer.Parameter)['__init__'], vars(
        chainer.Parameter)['initialize']


ORIGINAL = methods()


def test_by_default_chainer_goes_on_as_usual():
    creation = Noting()
    with creating(creation):
        link = L.Linear(None, 2)
        link(numpy.ones((1, 3), 'f'))
    assert creation.made == []
    assert (2, 3) in creation.shaped
    assert link.W.array.any()
    assert methods() == ORIGINAL


def test_who_creates_gets_parameters_without_values():
    creation = Noting(creates=True)
    with creating(creation):
        made = [chainer.Parameter(0, (2, 3)), chainer.Parameter(0)]
        given = chainer.Parameter(numpy.ones(3))
    assert creation.made == [(2, 3), None]
    assert [parameter.array for parameter in made] == [None, None]
    assert given.array.tolist() == [1, 1, 1]


def test_who_initializes_does_it_all():
    with creating(Noting(initializes=True)):
        link = L.Linear(None, 2)
        link.W.initialize((2, 3))
    assert link.W.array is None


def test_another_thread_sees_nothing_of_it():
    found = []
    creation = Noting(creates=True)
    with creating(creation):
        thread = threading.Thread(target=lambda: found.append(
            chainer.Parameter(0, (2,)).array))
        thread.start()
        thread.join()
    assert found[0].tolist() == [0, 0]
    assert creation.made == []


def test_the_innermost_block_is_asked_and_errors_end_it():
    outer, inner = Noting(creates=True), Noting(creates=True)
    with creating(outer):
        with pytest.raises(ValueError, match='shape'), creating(inner):
            chainer.Parameter(0, shape=_raised(chainer.Parameter(0, (1,))))
        chainer.Parameter(0, (2,))
    assert (inner.made, outer.made) == ([(1,)], [(2,)])
    assert methods() == ORIGINAL


def test_somebody_elses_initialize_is_called_where_chainers_would_be(
        monkeypatch):
    called, original = [], chainer.Parameter.initialize

    def theirs(parameter, shape):
        called.append(shape)
        original(parameter, shape)
    monkeypatch.setattr(chainer.Parameter, 'initialize', theirs)
    for creation, shape in ((Noting(), (2,)),
                            (Noting(initializes=True), (3,))):
        with creating(creation):
            chainer.Parameter(0).initialize(shape)
    assert called == [(2,)]
    assert chainer.Parameter.initialize is theirs


def _raised(parameter):
    raise ValueError('no shape')
