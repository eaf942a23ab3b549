"""Arrays between ranks, whatever they are and whatever fails."""
import itertools

from chainer_fp8pipe.channel.channel import Receiver, RemoteError, Sender
from chainer_fp8pipe.channel.headers import FRAME

import numpy
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.codecs import fake_cupy
from tests.pipeline.helpers import assert_same
from tests.ranks import on_ranks

TAG = 3
BIG = 2 ** 20       # float64 numbers; far more than MPI sends unasked


def channel(comm, codec=None, tag=TAG):
    """To and from the next rank of two, under the same tag."""
    other = 1 - comm.rank
    return Sender(comm, other, tag, codec), Receiver(comm, other, tag, codec)


class Counting:
    """A communicator that notes the bytes of each message that it sends."""

    def __init__(self, comm):
        self._comm = comm
        self.sent = []

    def Isend(self, message, dest, tag):
        self.sent.append(memoryview(message[0]).nbytes)
        return self._comm.Isend(message, dest, tag)

    def __getattr__(self, name):
        return getattr(self._comm, name)


# --- any sequence of messages ------------------------------------------------

# Few shapes, so that some follow one another; of less, about and more than
# the bytes of a frame.
SHAPES = [(), (0,), (3,), (2, 5), (5, 2), (126,), (127,), (128,), (129,),
          (16, 16), (1000,), (300, 7)]
ARRAYS = st.tuples(st.sampled_from(SHAPES),
                   st.sampled_from(['f8', 'f4', 'f2', 'i1', 'U1']),
                   st.sampled_from('CFS'))
MESSAGES = st.tuples(
    st.lists(st.none() | ARRAYS, max_size=3) | ARRAYS.map(lambda a: [a]),
    st.integers(1, 3)).map(lambda pair: [pair[0]] * pair[1])
STEPS = st.lists(st.lists(MESSAGES, min_size=1, max_size=4).map(
    lambda lists: list(itertools.chain(*lists))), min_size=1, max_size=3)


def make(message, number):
    """The arrays of a message, with values of their own."""
    arrays = []
    for index, entry in enumerate(message):
        if entry is None:
            arrays.append(None)
            continue
        shape, dtype, order = entry
        size = int(numpy.prod(shape))
        array = (numpy.arange(size) + 7 * number + index) % 100
        array = array.astype(dtype).reshape(shape)
        if order == 'F':
            array = numpy.asfortranarray(array)
        elif order == 'S' and shape:
            array = numpy.repeat(array, 2, axis=0)[::2]
        arrays.append(array)
    return tuple(arrays)


@on_ranks(2)
def exchange(comm, plans, eager, failure):
    """Each rank sends as its plan says, and gets what the other's says."""
    sender, receiver = channel(comm)
    mine, other = plans[comm.rank], plans[1 - comm.rank]
    for step in range(max(len(mine), len(other))):
        out = mine[step] if step < len(mine) else []
        into = other[step] if step < len(other) else []
        if not eager:
            for number, message in enumerate(out):
                sender.send(make(message, number))
        receiver.expect(len(into))
        for number in range(max(len(into), len(out))):
            if eager and number < len(out):
                sender.send(make(out[number], number))
            if number < len(into):
                assert_same(receiver.receive(), make(into[number], number))
        sender.flush()
    if failure:
        sender.fail(failure)
        receiver.expect(5)
        with pytest.raises(RemoteError) as caught:
            receiver.receive()
        assert str(caught.value) == failure
    # Nothing is left behind, and nothing is waited for.
    comm.Barrier()
    assert not receiver._posted
    assert not comm.Iprobe()


@given(st.tuples(STEPS, STEPS), st.booleans(),
       st.sampled_from(['', 'oh', 'x' * FRAME * 2]))
# Each failure ends a job of ranks, so a shorter one is not looked for.
@settings(max_examples=60,
          phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_any_sequence_of_messages_arrives_in_both_directions_at_once(
        plans, eager, failure):
    exchange(ranks=2, plans=plans, eager=eager, failure=failure)


# --- what travels ------------------------------------------------------------

@on_ranks(2)
def test_one_message_per_transfer_unless_the_shape_changes(comm):
    counting = Counting(comm)
    sender, receiver = channel(counting)
    even, last = numpy.ones((60, 50)), numpy.ones((4, 50))
    for _ in range(3):
        receiver.expect(9)
        counting.sent.clear()
        for _ in range(8):
            sender.send((even,))
        assert [size for size in counting.sent if size > FRAME] == (
            [even.nbytes] * 8)
        # A description, and a filler as the new arrays are larger.
        assert len(counting.sent) == 8 + 2
        counting.sent.clear()
        sender.send((last,))
        assert len(counting.sent) == 2
        assert counting.sent[1] == last.nbytes
        for _ in range(8):
            assert_same(receiver.receive(), (even,))
        assert_same(receiver.receive(), (last,))
    sender.flush()


@on_ranks(2)
def test_the_same_shape_next_step_needs_no_description(comm):
    counting = Counting(comm)
    sender, receiver = channel(counting)
    array = numpy.ones((10, 10), numpy.float16)
    for step in range(3):
        counting.sent.clear()
        receiver.expect(4)
        for _ in range(4):
            sender.send((array,))
            assert_same(receiver.receive(), (array,))
        assert len(counting.sent) == (5 if step == 0 else 4)
    # Half precision stays half on its way.
    assert counting.sent == [200] * 4
    sender.flush()


@on_ranks(2)
def test_fp8_crosses_with_one_byte_per_float(comm):
    counting = Counting(comm)
    sender, receiver = channel(counting, 'fp8')
    array = numpy.linspace(-1, 1, 5000).astype(numpy.float32)
    whole = numpy.arange(7)
    receiver.expect(2)
    sender.send((array,))
    assert counting.sent[-1] == 5004
    sender.send((array, whole))
    found, = receiver.receive()
    again, same = receiver.receive()
    sender.flush()
    assert found.dtype == numpy.float32
    assert (abs(found - array) <= abs(array) / 8 + 2.0 ** -31).all()
    assert (found != array).any()
    numpy.testing.assert_array_equal(again, found)
    numpy.testing.assert_array_equal(same, whole)


@on_ranks(2)
def test_64_megabytes_cross_in_both_directions_at_once(comm):
    sender, receiver = channel(comm)
    array = numpy.full(2 ** 23, comm.rank, numpy.float64)
    receiver.expect(3)
    sender.send((array[:5],))
    sender.send((array,))
    sender.send((array[:5],))
    assert_same(receiver.receive(), (1 - array[:5],))
    assert_same(receiver.receive(), (1 - array,))
    assert_same(receiver.receive(), (1 - array[:5],))
    sender.flush()


@on_ranks(2)
def test_sending_does_not_wait_for_the_receiver(comm):
    sender, receiver = channel(comm)
    if comm.rank == 0:
        for number in range(4):
            sender.send((numpy.full(BIG, number),))
        comm.send('all sent', 1, tag=0)
        sender.flush()
    else:
        assert comm.recv(source=0, tag=0) == 'all sent'
        receiver.expect(4)
        for number in range(4):
            assert_same(receiver.receive(), (numpy.full(BIG, number),))


@on_ranks(2)
def test_after_flush_arrays_may_be_changed(comm):
    sender, receiver = channel(comm)
    array = numpy.ones(BIG)
    receiver.expect(1)
    sender.send((array,))
    found, = receiver.receive()
    sender.flush()
    array[:] = 0
    comm.Barrier()
    assert (found == 1).all()


@on_ranks(2)
def test_what_was_received_is_the_receivers_to_keep_and_to_change(comm):
    sender, receiver = channel(comm)
    messages = [(numpy.full(shape, number, 'f4'),) * copies
                for number, (shape, copies) in enumerate(
                    [(5, 1), (5, 1), (2000, 1), (2000, 1), (2000, 2),
                     (2000, 2), (5, 1)])]
    receiver.expect(len(messages))
    found = []
    for message in messages:
        sender.send(message)
        found.append(receiver.receive())
    sender.flush()
    for one, other in itertools.combinations(itertools.chain(*found), 2):
        assert not numpy.shares_memory(one, other)
    for arrays, message in zip(found, messages, strict=True):
        assert_same(arrays, message)
        for array in arrays:
            array += 1


@on_ranks(3)
def test_channels_do_not_disturb_one_another(comm):
    """Every pair of ranks, two tags each, received in reverse."""
    others = [rank for rank in range(3) if rank != comm.rank]
    pairs = [(other, tag) for other in others for tag in (0, 1)]
    receivers = {pair: Receiver(comm, *pair) for pair in pairs}
    senders = {pair: Sender(comm, *pair) for pair in pairs}
    for receiver in receivers.values():
        receiver.expect(3)
    for number in range(3):
        for (other, tag), sender in senders.items():
            sender.send((numpy.array([comm.rank, other, tag, number]),) * (
                number + tag + 1))
    for (other, tag), receiver in reversed(receivers.items()):
        for number in range(3):
            assert_same(receiver.receive(), (numpy.array(
                [other, comm.rank, tag, number]),) * (number + tag + 1))
    for sender in senders.values():
        sender.flush()


@on_ranks(2, timeout=300)
def test_arrays_on_a_device_arrive_on_a_device(comm):
    rng = numpy.random.default_rng(0)
    host = (rng.standard_normal((30, 40)).astype('f4'), None,
            rng.standard_normal((3, 4)).astype('f2').T)
    with fake_cupy.installed() as cupy:
        for codec in (None, 'fp8'):
            sender = Sender(comm, 1 - comm.rank, TAG, codec)
            receiver = Receiver(comm, 1 - comm.rank, TAG, codec, cupy)
            receiver.expect(3)
            for arrays in (host, host, host[:1]):
                sender.send(tuple(
                    array if array is None else fake_cupy.ndarray(array)
                    for array in arrays))
                found = receiver.receive()
                assert isinstance(found[0], cupy.ndarray)
                found = [array if array is None else array.get()
                         for array in found]
                if codec is None:
                    assert_same(found, arrays)
                else:
                    assert found[0].dtype == numpy.float32
                    assert (abs(found[0] - arrays[0])
                            <= abs(arrays[0]) / 8 + 2.0 ** -20).all()
            sender.flush()


# --- failures ----------------------------------------------------------------

@pytest.mark.parametrize('text', ['stage 1 failed', '', 'ärger ' * 3000])
@pytest.mark.parametrize('before', [0, 1, 2])
@pytest.mark.parametrize('posted', [False, True])
@on_ranks(2)
def test_a_failure_arrives_after_what_was_sent_before(
        comm, before, posted, text):
    """Be a receive posted already or not, be messages large or not."""
    for number in (3, 200, BIG):
        sender, receiver = channel(comm)
        array = numpy.arange(float(number))
        if posted:
            receiver.expect(10)
        for _ in range(before):
            sender.send((array,))
        sender.fail(text)
        comm.Barrier()
        if not posted:
            receiver.expect(10)
        for _ in range(before):
            assert_same(receiver.receive(), (array,))
        for _ in range(2):
            with pytest.raises(RemoteError) as caught:
                receiver.receive()
            assert str(caught.value) == text
        receiver.cancel()
        comm.Barrier()
        assert comm.Iprobe(tag=2 * TAG + 1)     # what cancel says
        with pytest.raises(RemoteError, match='gave up'):
            sender.flush()


@on_ranks(2)
def test_a_failure_as_long_as_the_arrays_is_not_taken_for_arrays(comm):
    for size in range(2, 12):
        sender, receiver = channel(comm)
        receiver.expect(2)
        sender.send((numpy.zeros(size, numpy.int8),))
        sender.fail('oh')
        receiver.receive()
        with pytest.raises(RemoteError, match='^oh$'):
            receiver.receive()
        sender.flush()


@on_ranks(2)
def test_nothing_can_be_sent_after_a_failure(comm):
    sender, receiver = channel(comm)
    sender.fail('first')
    sender.fail('second')
    with pytest.raises(RuntimeError, match='closed by a failure'):
        sender.send((numpy.zeros(3),))
    receiver.expect(1)
    with pytest.raises(RemoteError, match='first'):
        receiver.receive()
    comm.Barrier()
    assert not comm.Iprobe()


@pytest.mark.parametrize('text', ['', 'rank 1 has no memory left'])
@pytest.mark.parametrize('expecting', [False, True])
@on_ranks(2)
def test_flush_ends_when_the_receiver_gives_up(comm, expecting, text):
    sender, receiver = channel(comm)
    if comm.rank == 0:
        for _ in range(3):
            sender.send((numpy.ones(BIG),))
        with pytest.raises(RemoteError, match=text or 'rank 1 gave up'):
            sender.flush()
        sender.fail('rank 0, too')      # does not wait either
        comm.Barrier()
    else:
        if expecting:
            receiver.expect(3)
        receiver.cancel(text)
        with pytest.raises(RuntimeError, match='no message from rank 0'):
            receiver.receive()
        comm.Barrier()
        take_all(comm)


@on_ranks(2)
def test_both_sides_may_fail_at_once(comm):
    sender, receiver = channel(comm)
    receiver.expect(3)
    for _ in range(3):
        sender.send((numpy.ones(BIG),))
    receiver.cancel(f'rank {comm.rank} failed')
    sender.fail(f'rank {comm.rank} failed')
    with pytest.raises(RemoteError, match=f'rank {1 - comm.rank} failed'):
        sender.flush()
    comm.Barrier()
    take_all(comm)
    comm.Barrier()


@on_ranks(2)
def test_new_channels_work_after_a_failure(comm):
    first = comm.Dup()
    sender, receiver = channel(first)
    receiver.expect(1)
    sender.send((numpy.ones(BIG),))
    receiver.cancel('oh')
    sender.fail('oh')
    second = comm.Dup()
    sender, receiver = channel(second)
    receiver.expect(1)
    sender.send((numpy.ones(3),))
    assert_same(receiver.receive(), (numpy.ones(3),))
    sender.flush()
    comm.Barrier()
    take_all(first)
    comm.Barrier()
    first.Free()
    second.Free()


@on_ranks(2)
def test_a_channel_that_is_dropped_leaves_memory_to_mpi(comm):
    """What was sent stays readable; nothing is received into freed memory."""
    sender, receiver = channel(comm)
    receiver.expect(2)
    comm.Barrier()
    del receiver
    for _ in range(3):
        sender.send((numpy.ones(BIG),))
    del sender
    comm.Barrier()
    assert take_all(comm) >= 3
    comm.Barrier()


def take_all(comm):
    """Takes what a failure left behind: MPI_Finalize does not like it."""
    count = 0
    while comm.Iprobe():
        wire = numpy.empty(8 * BIG, numpy.uint8)
        comm.Recv(wire)
        count += 1
    return count


# --- bad input ---------------------------------------------------------------

@on_ranks(2)
def test_receiving_what_nobody_announced_is_an_error_and_no_hang(comm):
    _, receiver = channel(comm)
    with pytest.raises(RuntimeError, match='from rank .* expect'):
        receiver.receive()


@on_ranks(2)
def test_what_cannot_be_sent_is_not_sent_in_part(comm):
    counting = Counting(comm)
    sender, receiver = channel(counting)
    for bad in [(numpy.zeros(2, object),), (numpy.zeros(3), 1.5)]:
        with pytest.raises(TypeError):
            sender.send(bad)
    assert counting.sent == []
    receiver.expect(1)
    sender.send((numpy.zeros(3),))
    assert_same(receiver.receive(), (numpy.zeros(3),))


@pytest.mark.parametrize('codecs', [('fp8', None), (None, 'fp8')])
@on_ranks(2)
def test_different_codecs_are_an_error_that_says_so(comm, codecs):
    sender = Sender(comm, 1 - comm.rank, TAG, codecs[0])
    receiver = Receiver(comm, 1 - comm.rank, TAG, codecs[1])
    receiver.expect(1)
    sender.send((numpy.zeros(3),))
    with pytest.raises(ValueError, match='the same codec'):
        receiver.receive()
    receiver.cancel()
    comm.Barrier()
    take_all(comm)


@on_ranks(1)
def test_unknown_codecs_and_tags_out_of_range_are_refused(comm):
    for kind in (Sender, Receiver):
        with pytest.raises(ValueError, match="'fp9', expected"):
            kind(comm, 0, 0, 'fp9')
        for tag in (-1, 2 ** 40):
            with pytest.raises(ValueError, match='tag is'):
                kind(comm, 0, tag)


@on_ranks(1)
def test_a_rank_can_send_to_itself(comm):
    sender, receiver = Sender(comm, 0, TAG), Receiver(comm, 0, TAG)
    receiver.expect(2)
    for size in (3, BIG):
        sender.send((numpy.ones(size),))
        assert_same(receiver.receive(), (numpy.ones(size),))
    sender.flush()
