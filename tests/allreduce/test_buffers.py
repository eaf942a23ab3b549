"""Memory that is used again."""
from chainer_fp8pipe.allreduce.buffers import Buffers


def test_what_was_given_back_is_lent_again():
    buffers = Buffers()
    first, second = buffers.take(100), buffers.take(90)
    assert first is not second
    assert first.nbytes >= 100
    buffers.give([first])
    assert buffers.take(50) is first


def test_what_is_too_small_now_is_dropped():
    buffers = Buffers()
    small = buffers.take(100)
    large = buffers.take(1000)
    buffers.give([small, large])
    assert buffers.take(1000) is large
    assert buffers.take(1000).nbytes >= 1000


def test_nothing_is_legal():
    assert Buffers().take(0).nbytes == 0
