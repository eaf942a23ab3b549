"""Bytes of exchanges, beside what communicators allocate."""
import gc
import tracemalloc

from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.allreduce.plan import LEVELS, torus2d, two_level
from chainer_fp8pipe.communicators.options import without_warmup
from chainer_fp8pipe.mpi.memory.node_memory import node_memory
from chainer_fp8pipe.planning.job.codec_choice import WIRE_BYTES
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
#: Many small frames.
FRAMES = {'frame_bytes': 3 << 13, 'frames_in_flight': 6}
CASES = [('int4', 'direct', {}), ('fp8', 'direct', {}), ('fp8', 'ring', {}),
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
    """Bytes that Python and the node's memory have more after an update.

    What is resident would depend on the kernel.
    """
    for _ in range(2):      # the first time, modules may be imported
        communicator = create_communicator(
            name, comm, **options, **without_warmup(name))
        link = model(comm.rank)
        gc.collect()
        before = node_memory().given_out()
        tracemalloc.start()
        communicator.multi_node_mean_grad(link)
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        kept += node_memory().given_out() - before
        # The wire's addresses are never written to, so that there is no
        # memory behind them.
        kept -= ELEMENTS * WIRE_BYTES[name]
        communicator.finalize()
    return kept


def test_with_overlap_wires_are_kept():
    for name in ('fp8', 'float32'):
        plans = [LEVELS['direct'](4)]
        with_, without = (exchange_bytes(
            name, ELEMENTS, plans, warm_up=False, overlap=overlap, **SPACE)
            for overlap in (True, False))
        assert with_ - without == pytest.approx(
            ELEMENTS * (4 if name == 'float32' else 1), abs=1000)


@on_ranks(2, 4)
def test_what_was_left_out_is_what_a_communicator_keeps(comm):
    for name, algorithm, options in CASES:
        options = {**options, **FRAMES}
        wanted = exchange_bytes(
            name, ELEMENTS, [LEVELS[algorithm](comm.size)], warm_up=False,
            **options) - _BUFFERS
        # What is traced besides is the interpreter's: names, tables; and
        # addresses are given out by the page.
        assert allocated(comm, name, algorithm=algorithm, shared_memory=False,
                         **options) == pytest.approx(wanted, abs=6e5)
        # Neighbours' messages need no room where they are received, but a
        # copy where they are sent.
        assert allocated(comm, name, algorithm=algorithm,
                         **options) < wanted + 6e5


@on_ranks(4)
def test_each_level_of_two_keeps_what_its_means_leave_out(comm):
    plan = two_level('direct', LEVELS['direct'](2), [[0, 1], [2, 3]])
    wanted = exchange_bytes('fp8', ELEMENTS, [plan], warm_up=False, **SPACE)
    assert wanted - _BUFFERS == pytest.approx(
        ELEMENTS * (4 + 4 / 2 + 4 / 4), abs=2000)
    wanted = exchange_bytes('fp8', ELEMENTS, [plan], warm_up=False, **FRAMES)
    assert allocated(comm, 'fp8', ranks_per_node=2, shared_memory=False,
                     **FRAMES) == pytest.approx(wanted - _BUFFERS, rel=0.3)


def test_both_halves_of_a_torus_count():
    assert exchange_bytes(
        'fp8', ELEMENTS, torus2d(2, 2), warm_up=False, **SPACE
        ) - _BUFFERS == pytest.approx(ELEMENTS * (4 + 4 / 4), abs=2000)


def test_frames_on_their_way_have_messages_and_sums():
    """A ring of four: a contribution of 1 byte, two sums of 2 bytes each
    way, sums of three blocks in float32, and the wire of all four."""
    one, two = (exchange_bytes('fp8', 10 ** 7, [LEVELS['ring'](4)],
                               frame_bytes=1000, frames_in_flight=count)
                for count in (1, 2))
    assert two - one == 1000 * (1 + 2 * 2 + 2 * 2 + 3 * 4 + 4)


def test_float32_before_fp8_may_need_more():
    plans = [LEVELS['direct'](64)]
    without, with_, short = (
        exchange_bytes('fp8', 10 ** 6, plans, error_feedback=feedback,
                       warm_up=warm_up, overlap=True, **SPACE)
        for feedback, warm_up in ((False, False), (False, True),
                                  (True, True)))
    assert without - _BUFFERS == pytest.approx(10 ** 6, rel=0.01)
    assert with_ - _BUFFERS == 4 * 10 ** 6
    assert short > with_
