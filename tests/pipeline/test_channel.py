"""Arrays between ranks, whatever they are and whatever fails."""
import contextlib
import itertools
import threading
from unittest import mock

from chainer_fp8pipe.pipeline.channel import (
    Receiver,
    RemoteError,
    Sender,
    describe,
    moving,
)

import numpy
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.codecs import fake_cupy
from tests.images.processes import eventually
from tests.ranks import on_ranks

TAGS = itertools.count()        # a receive may stay posted for ever
BIG = 2 ** 20       # float64 numbers; far more than MPI sends unasked


def channel(comm):
    """To and from the next rank of two, under a tag of their own."""
    other, tag = 1 - comm.rank, next(TAGS)
    return Sender(comm, other, tag), Receiver(comm, other, tag)


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
def exchange(comm, plans, eager, looks):
    """Each rank sends as its plan says, and gets what the other's says.

    The receiver looks for one before it wants it, or not.
    """
    sender, receiver = channel(comm)
    mine, other = plans[comm.rank], plans[1 - comm.rank]
    for step in range(max(len(mine), len(other))):
        out = mine[step] if step < len(mine) else []
        into = other[step] if step < len(other) else []
        if not eager:
            for number, transfer in enumerate(out):
                sender.send(make(transfer, number))
        comm.Barrier()
        if looks:
            receiver.look()
        for number in range(max(len(into), len(out))):
            if eager and number < len(out):
                sender.send(make(out[number], number))
            if number < len(into):
                assert_same(receiver.receive(), make(into[number], number))
        comm.Barrier()
        sender.flush()
    comm.Barrier()
    assert not comm.Iprobe()


@given(st.tuples(STEPS, STEPS), st.booleans(), st.booleans())
# Each failure ends a job of ranks, so a shorter one is not looked for.
@settings(max_examples=60,
          phases=[Phase.reuse, Phase.generate])
def test_any_sequence_of_transfers_arrives_in_both_directions_at_once(
        plans, eager, looks):
    exchange(ranks=2, plans=plans, eager=eager, looks=looks)


# --- what travels ------------------------------------------------------------

@on_ranks(2)
def test_arrays_on_devices_and_hosts_arrive_where_they_shall(comm):
    rng = numpy.random.default_rng(0)
    host = (rng.standard_normal((30, 40)).astype('f4'), None,
            rng.standard_normal((3, 4)).astype('f2').T, numpy.zeros((0, 2)))
    with fake_cupy.installed() as cupy:
        device = [array if array is None else fake_cupy.ndarray(array)
                  for array in host]
        for xp, sent in itertools.product(
                (numpy, cupy),
                (device, device, device[:1], [device[0], *host[1:]])):
            sender, receiver = channel(comm)
            receiver._xp = xp
            for _ in range(4):
                sender.send(sent)
                found = receiver.receive()
                assert all(one is None or isinstance(one, xp.ndarray)
                           for one in found)
                for one, other in zip(found, host, strict=False):
                    if one is not None:
                        one = one if xp is numpy else one.get()
                        assert one.dtype == other.dtype
                        numpy.testing.assert_array_equal(one, other)
            sender.flush()


# --- failures ----------------------------------------------------------------

@on_ranks(2)
def test_who_waits_asks_a_function_that_may_raise(comm):
    """Of what a header or an array has not come yet, and of what was sent."""
    asked = []

    def wait(done):
        while not done():
            asked.append(1)
            if len(asked) > 3:
                raise RemoteError('the other rank failed')
    alone = comm.Dup()
    receiver = Receiver(alone, 1 - comm.rank, 0, wait=wait)
    with pytest.raises(RemoteError, match='the other rank failed'):
        receiver.receive()
    comm.Barrier()              # nothing is sent while the other rank asks
    if comm.rank == 0:
        sender = Sender(alone, 1, 0, wait=wait)
        sender.send((numpy.ones(BIG),))
        with pytest.raises(RemoteError, match='the other rank failed'):
            sender.flush()
        del sender
    take_all(alone)
    alone.Free()


@on_ranks(2)
def test_a_channel_that_is_dropped_leaves_memory_to_mpi(comm):
    """What was sent stays readable; nothing is received into freed memory."""
    sender, receiver = channel(comm)
    sender.send((numpy.ones(BIG),))
    receiver.receive()
    comm.Barrier()
    del receiver
    for _ in range(2):
        sender.send((numpy.ones(BIG),))
    del sender
    take_all(comm)


# --- bad input ---------------------------------------------------------------

@on_ranks(2)
def test_what_cannot_be_sent_is_not_sent_in_part(comm):
    sender, receiver = channel(comm)
    for bad, text in [((numpy.zeros(2, object),), 'dtype object cannot be'),
                      ((numpy.zeros(2, [('a', 'f4')]),), 'cannot be sent'),
                      ((numpy.zeros(3), 1.5), 'array 1 of .* float'),
                      ((numpy.zeros(3), [1.5]), 'array 1 of .* list')]:
        with pytest.raises(TypeError, match=text):
            sender.send(bad)
        with pytest.raises(TypeError, match=text):
            describe(bad)
    sender.send((numpy.zeros(3),))
    assert_same(receiver.receive(), (numpy.zeros(3),))
    sender.flush()


@on_ranks(2)
def test_sums_over_what_arrives_have_the_senders_bits(comm):
    array = numpy.arange(12, dtype='f').reshape(3, 4)
    for sent in numpy.broadcast_to(array[:, None], (3, 5, 4)), array[::-1]:
        if comm.rank == 0:
            sender = Sender(comm, 1, 0)
            assert sender.send([sent]) == array.nbytes  # each number once
            sender.flush()
            continue
        found, = Receiver(comm, 0, 0).receive()
        numpy.testing.assert_array_equal(found, sent)
        assert numpy.argsort(numpy.abs(found.strides)).tolist() == (
            numpy.argsort(numpy.abs(sent.strides)).tolist())


@on_ranks(1)
def test_an_error_beside_is_raised_where_it_is_received(comm):
    receiver = Receiver(comm, 0, 0)
    with mock.patch.object(
            Receiver, 'look', side_effect=MemoryError('full')), moving(
            lambda: [receiver], contextlib.nullcontext):
        assert eventually(lambda: receiver.error)
    with pytest.raises(MemoryError, match='full'):
        receiver.receive()


@on_ranks(1)
def test_a_device_is_current_where_messages_move_beside(comm):
    current = threading.local()
    seen = []

    @contextlib.contextmanager
    def on_device():
        current.device = 'a GPU'
        yield
        seen.append('left')

    def look(receiver):
        seen.append(getattr(current, 'device', None))
    receiver = Receiver(comm, 0, 0)
    with mock.patch.object(Receiver, 'look', look), moving(
            lambda: [receiver], on_device):
        assert eventually(lambda: seen)
    assert {*seen[:-1]} == {'a GPU'}
    assert seen[-1] == 'left'
