"""Arrays between ranks, whatever they are and whatever fails."""
import itertools

from chainer_fp8pipe.pipeline.channel import (
    Channels,
    RemoteError,
    describe,
)

import numpy
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.codecs import fake_cupy
from tests.ranks import on_ranks

BIG = 2 ** 20       # float64 numbers; far more than MPI sends unasked


def take_all(comm):
    """Takes what a failure left behind: MPI_Finalize does not like it."""
    comm.Barrier()
    while comm.Iprobe():
        comm.Recv(numpy.empty(8 * BIG, numpy.uint8))
    comm.Barrier()


def assert_same(found, wanted):
    """Equal arrays of equal shapes and dtypes, and None at equal places."""
    for one, other in zip(found, wanted, strict=True):
        if other is None:
            assert one is None
        else:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            numpy.testing.assert_array_equal(one, other)


# --- any sequence of transfers -----------------------------------------------

SHAPES = [(), (0,), (3,), (2, 5), (5, 2), (16, 16), (1000,), (300, 7)]
ARRAYS = st.tuples(
    st.sampled_from(SHAPES), st.sampled_from(
        ['f8', 'f4', 'f2', '>f4', '?', 'i1', 'u8', 'c8', 'U3', 'S5',
         'M8[s]']),
    # In C's and Fortran's order, with gaps, backwards, as convolutions leave
    # them, and with the same number repeated in memory.
    st.sampled_from('CFSRMB'))
TRANSFERS = st.tuples(
    st.lists(st.none() | ARRAYS, max_size=3) | ARRAYS.map(lambda a: [a]),
    st.integers(1, 3)).map(lambda pair: [pair[0]] * pair[1])
STEPS = st.lists(st.lists(TRANSFERS, min_size=1, max_size=4).map(
    lambda lists: list(itertools.chain(*lists))), min_size=1, max_size=3)


def make(transfer, number):
    """The arrays of a transfer, with values of their own."""
    arrays = []
    for index, entry in enumerate(transfer):
        if entry is None:
            arrays.append(None)
            continue
        shape, dtype, order = entry
        size = int(numpy.prod(shape))
        array = ((numpy.arange(size) + 7 * number + index) % 100).astype(
            'i8' if dtype == 'M8[s]' else dtype).astype(dtype).reshape(shape)
        if order == 'F':
            array = numpy.asfortranarray(array)
        elif order == 'S' and shape:
            array = numpy.repeat(array, 2, axis=0)[::2]
        elif order == 'R' and shape:
            array = array[::-1]
        elif order == 'M' and shape:
            array = numpy.moveaxis(numpy.moveaxis(array, 0, -1).copy(), -1, 0)
        elif order == 'B':
            array = numpy.broadcast_to(array, (2, *shape))
        array.flags.writeable = False
        arrays.append(array)
    return tuple(arrays)


@on_ranks(2)
def exchange(comm, plans, eager):
    """Each rank sends as its plan says, and gets what the other's says."""
    channels, peer = Channels(comm, 0), 1 - comm.rank
    mine, other = plans[comm.rank], plans[peer]
    for step in range(max(len(mine), len(other))):
        out = mine[step] if step < len(mine) else []
        into = other[step] if step < len(other) else []
        if not eager:
            for number, transfer in enumerate(out):
                channels.send(make(transfer, number), peer)
        comm.Barrier()
        for number in range(max(len(into), len(out))):
            if eager and number < len(out):
                channels.send(make(out[number], number), peer)
            if number < len(into):
                assert_same(channels.receive(peer),
                            make(into[number], number))
        comm.Barrier()
        channels.flush()
    comm.Barrier()
    assert not channels._comm.Iprobe()


@given(st.tuples(STEPS, STEPS), st.booleans())
# Each failure ends a job of ranks, so a shorter one is not looked for.
@settings(max_examples=60,
          phases=[Phase.reuse, Phase.generate])
def test_any_sequence_of_transfers_arrives_in_both_directions_at_once(
        plans, eager):
    exchange(ranks=2, plans=plans, eager=eager)


# --- what travels ------------------------------------------------------------

@on_ranks(2)
def test_arrays_on_devices_and_hosts_arrive_where_they_shall(comm):
    rng = numpy.random.default_rng(0)
    host = (rng.standard_normal((30, 40)).astype('f4'), None,
            rng.standard_normal((3, 4)).astype('f2').T, numpy.zeros((0, 2)))
    with fake_cupy.installed():
        import cupy
        device = [array if array is None else fake_cupy.ndarray(array)
                  for array in host]
        for xp, sent in itertools.product(
                (numpy, cupy),
                (device, device, device[:1], [device[0], *host[1:]])):
            channels = Channels(comm, 0, xp)
            for _ in range(4):
                channels.send(sent, 1 - comm.rank)
                found = channels.receive(1 - comm.rank)
                assert all(one is None or isinstance(one, xp.ndarray)
                           for one in found)
                for one, other in zip(found, host, strict=False):
                    if one is not None:
                        one = one if xp is numpy else one.get()
                        assert one.dtype == other.dtype
                        numpy.testing.assert_array_equal(one, other)
            channels.flush()


# --- failures ----------------------------------------------------------------

@on_ranks(2)
def test_who_waits_hears_that_another_rank_has_failed(comm):
    """Of what has not come yet, and of what was sent."""
    alone = comm.Dup()
    channels = Channels(alone, 0)
    if comm.rank == 0:
        channels.send((numpy.ones(BIG),), 1)
    comm.Barrier()              # nothing else is sent while a rank waits
    channels.fail('it is out of paper')
    comm.Barrier()
    with pytest.raises(RemoteError, match='out of paper'):
        channels.flush() if comm.rank == 0 else channels.receive(0, 1)
    channels.renew()
    take_all(channels._comm)


@on_ranks(2)
def test_channels_that_are_dropped_leave_memory_to_mpi(comm):
    """What was sent stays readable; nothing is received into freed memory."""
    channels, peer = Channels(comm, 0), 1 - comm.rank
    channels.send((numpy.ones(BIG),), peer)
    channels.receive(peer)
    for _ in range(2):
        channels.send((numpy.ones(BIG),), peer)
    own = channels._comm
    del channels
    take_all(own)


# --- bad input ---------------------------------------------------------------

@on_ranks(2)
def test_what_cannot_be_sent_is_not_sent_in_part(comm):
    channels, peer = Channels(comm, 0), 1 - comm.rank
    for bad, text in [((numpy.zeros(2, object),), 'of dtype object cannot be'),
                      ((numpy.zeros(3), 1.5), 'a float of dtype None cannot'),
                      ((numpy.zeros(3), [1.5]), 'a list of dtype None')]:
        with pytest.raises(TypeError, match=text):
            channels.send(bad, peer)
        with pytest.raises(TypeError, match=text):
            describe(bad)
    sent = (numpy.zeros(3, [('a', 'f4'), ('b', 'i2')]),)
    channels.send(sent, peer)
    assert_same(channels.receive(peer), sent)
    channels.flush()


@on_ranks(2)
def test_sums_over_what_arrives_have_the_senders_bits(comm):
    array = numpy.arange(12, dtype='f').reshape(3, 4)
    channels = Channels(comm, 0)
    for sent in numpy.broadcast_to(array[:, None], (3, 5, 4)), array[::-1]:
        if comm.rank == 0:
            assert channels.send([sent], 1) == array.nbytes  # each number once
            channels.flush()
            continue
        found, = channels.receive(0)
        numpy.testing.assert_array_equal(found, sent)
        assert numpy.argsort(numpy.abs(found.strides)).tolist() == (
            numpy.argsort(numpy.abs(sent.strides)).tolist())
