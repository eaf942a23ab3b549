"""Bytes of exchanges, beside what communicators allocate."""
import tracemalloc

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.allreduce.plan import LEVELS, torus2d, two_level
from chainer_fp8pipe.planning.job.exchange_memory import (
    _BUFFERS,
    exchange_bytes,
)

import chainer
import numpy
import pytest

from tests.ranks import on_ranks

ELEMENTS = 400_000
SPACE = {'frame_bytes': 24, 'frames_in_flight': 1}
CASES = [('fp8', 'direct', {}), ('fp8', 'ring', {}),
         ('fp8', 'ring', {'partial_sums': 'wire'}),
         ('fp8', 'direct', {'error_feedback': False}),
         ('float16', 'direct', {}), ('float32', 'ring', {})]


def model(rank):
    link = chainer.Link()
    with link.init_scope():
        for number in range(4):
            parameter = chainer.Parameter(numpy.ones(ELEMENTS // 4, 'f'))
            parameter.grad = numpy.full(ELEMENTS // 4, rank + 1, 'f')
            setattr(link, f'x{number}', parameter)
    return link


def allocated(comm, name, **options):
    """Bytes that Python has more after an update than before."""
    for _ in range(2):      # the first time, modules may be imported
        communicator = create_communicator(
            name, comm, **options, **{'warmup': 0} if name == 'fp8' else {})
        link = model(comm.rank)
        tracemalloc.start()
        communicator.multi_node_mean_grad(link)
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        communicator.finalize()
    return kept


@on_ranks(2, 4)
def test_wires_and_what_was_left_out_are_what_a_communicator_keeps(comm):
    for name, algorithm, options in CASES:
        wanted = exchange_bytes(
            name, ELEMENTS, [LEVELS[algorithm](comm.size)], warm_up=False,
            **options, **SPACE) - _BUFFERS
        # What is traced besides is the interpreter's: names, tables.
        assert allocated(comm, name, algorithm=algorithm,
                         **options) == pytest.approx(wanted, abs=3e4)


@on_ranks(4)
def test_each_level_of_two_keeps_what_its_means_leave_out(comm):
    plan = two_level('direct', LEVELS['direct'](2), [[0, 1], [2, 3]])
    wanted = exchange_bytes('fp8', ELEMENTS, [plan], warm_up=False, **SPACE)
    assert wanted - _BUFFERS == pytest.approx(
        ELEMENTS * (1 + 4 + 4 / 2 + 4 / 4), abs=1000)
    assert allocated(comm, 'fp8', ranks_per_node=2) == pytest.approx(
        wanted - _BUFFERS, abs=3e4)


def test_both_halves_of_a_torus_count():
    assert exchange_bytes(
        'fp8', ELEMENTS, torus2d(2, 2), warm_up=False, **SPACE
        ) - _BUFFERS == pytest.approx(ELEMENTS * (1 + 4 + 4 / 4), abs=1000)


def test_frames_on_their_way_have_messages_and_sums():
    """A ring of four: a contribution of 1 byte, two sums of 2 bytes each
    way, and sums of three blocks in float32."""
    one, two = (exchange_bytes('fp8', 10 ** 7, [LEVELS['ring'](4)],
                               frame_bytes=1000, frames_in_flight=count)
                for count in (1, 2))
    assert two - one == 1000 * (1 + 2 * 2 + 2 * 2 + 3 * 4)


def test_float32_before_fp8_may_need_more():
    plans = [LEVELS['direct'](64)]
    without, with_, short = (
        exchange_bytes('fp8', 10 ** 6, plans, error_feedback=feedback,
                       warm_up=warm_up, **SPACE)
        for feedback, warm_up in ((False, False), (False, True),
                                  (True, True)))
    assert without - _BUFFERS == pytest.approx(10 ** 6, rel=0.01)
    assert with_ - _BUFFERS == 4 * 10 ** 6
    assert short > with_
