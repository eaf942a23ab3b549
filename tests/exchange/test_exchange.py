"""Sending buckets, where something goes wrong."""
from chainer_fp8pipe.allreduce import Statistics
from chainer_fp8pipe.codecs import Cast, Tensors
from chainer_fp8pipe.exchange.exchange import Exchange, Transfer

import numpy
import pytest
from mpi4py import MPI


class Broken(Cast):
    """It fails when a bucket is launched."""

    def settle(self, tensors, proposed):
        raise ZeroDivisionError('so it goes')


def test_who_waits_for_what_could_not_be_sent_is_told_so():
    exchange = Exchange(MPI.COMM_SELF, None, Statistics())
    values = [numpy.ones(3, 'f4')]
    transfer = Transfer(Broken('float32'), Tensors('a', values, values),
                        numpy.zeros(3, 'f4'))
    exchange.submit(transfer)
    with pytest.raises(ZeroDivisionError):
        exchange.advance()
    for _ in range(2):
        with pytest.raises(RuntimeError, match='not be sent.*so it goes'):
            exchange.finish(transfer)
    exchange.free()
