"""What a core does per second while all ranks of a machine work.

A core that is alone has the memory for itself; ranks that encode and sum at
the same time do not.  The model is given what is measured here.
"""
from __future__ import annotations

import functools
import os
import time

from chainer_fp8pipe.bench.allreduce import model
from chainer_fp8pipe.codecs import Cast, Fp8Ratio, Tensors
from chainer_fp8pipe.mpi.waiting import wait_until

import numpy
from codec_updates import begin
from mpi4py import MPI

SIZE = 1 << 21          # elements, more than caches hold
FRAME = 3 << 13         # elements that an exchange takes at a time
OVERHEAD = 16           # elements of which all time is the interpreter's
REPEATS = 5
SHORT = 1 << 10, 1 << 13        # bytes that no link makes wait, one by one
APART = 5e-3            # seconds
MANY = 32               # messages
PAIRS = 101             # of times that are compared


def core_rates(comm):
    """Elements per second by codec and operation, of one core.

    All ranks do the same at the same time, frame by frame, as an exchange
    does; ``comm`` is of ranks that share a machine.
    """
    link = model(comm, SIZE)
    rates = {}
    for codec in (Fp8Ratio(), Cast('float32')):
        tensors = Tensors(['/x'], [link.x.grad], [link.x.array])
        begin(codec, tensors, lambda found: comm.Allreduce(
            MPI.IN_PLACE, found, MPI.MAX))
        rates[codec.name] = {
            name: _rate(comm, action)
            for name, action in _operations(codec, tensors).items()}
    return rates


def message_costs(comm):
    """Seconds of latency, and for which messages and bytes keep ranks busy.

    All ranks send to either neighbour at the same time, so little and so far
    apart that no link makes anybody wait: what takes time is the ranks.
    """
    # Of a message to either side, one after the other on each core.
    ends = 4 * max(comm.size / os.cpu_count(), 1)
    messages, bytes_ = [], []
    for _ in range(PAIRS):
        many, few, long = (
            _messages_seconds(comm, size, count)
            for size, count in ((1, MANY), (1, 2), (FRAME, 2)))
        messages.append(many - few)
        bytes_.append(long - few)
    message = max(float(numpy.median(messages)), 0.0) / ends / (MANY - 2)
    byte = max(float(numpy.median(bytes_)), 0.0) / ends / 2 / FRAME
    alone = min(_ping_pong(comm, size) for size in SHORT)
    return {'message_cost': message, 'byte_cost': byte,
            'latency': max(alone - 2 * message, 0.0)}


def _ping_pong(comm, size):
    """Median seconds of a message, one way, between ranks 0 and 1."""
    data = numpy.zeros(size, numpy.uint8)
    seconds = []
    for _ in range(21):
        comm.Barrier()
        start = time.perf_counter()
        if comm.rank == 0:
            comm.Send(data, 1)
            comm.Recv(data, 1)
        elif comm.rank == 1:
            comm.Recv(data, 0)
            comm.Send(data, 0)
        seconds.append((time.perf_counter() - start) / 2)
    return comm.bcast(float(numpy.median(seconds)))


def _messages_seconds(comm, size, count):
    """Seconds until every rank has ``count`` messages of either neighbour."""
    peers = [(comm.rank + step) % comm.size for step in (1, -1)] * count
    sent = numpy.zeros(size, numpy.uint8)
    received = numpy.zeros((len(peers), size), numpy.uint8)
    time.sleep(APART)
    comm.Barrier()
    start = time.perf_counter()
    requests = [comm.Irecv(row, peer) for row, peer
                in zip(received, peers, strict=True)]
    requests += [comm.Isend(sent, peer) for peer in peers]
    # As an exchange waits: not on a core that another rank needs.
    wait_until(functools.partial(MPI.Request.Testall, requests))
    return comm.allreduce(time.perf_counter() - start, MPI.MAX)


def _operations(codec, tensors):
    wire = numpy.zeros(SIZE, codec.wire_dtype)
    message = numpy.zeros(FRAME, codec.wire_dtype)
    total, ones = numpy.zeros(FRAME, 'f4'), numpy.ones(FRAME, 'f4')
    half = numpy.zeros(FRAME, 'f2')

    def add_partial(part):
        # As sums in float16 are.
        values = half[:part.stop - part.start].astype(numpy.float32)
        values *= numpy.float32(4)
        ones[:values.size] += values

    def encode_mean(part):
        codec.encode_mean(tensors, total[:part.stop - part.start], 4,
                          wire[part], part.start, 'rates', (0, SIZE))
    return {
        'encode': lambda part: codec.encode(tensors, wire[part], 1.0,
                                            part.start),
        'decode': lambda part: codec.decode(tensors, wire[part], part.start),
        'add': lambda part: codec.add(message[:part.stop - part.start],
                                      wire[part]),
        'accumulate': lambda part: codec.accumulate(
            wire[part], total[:part.stop - part.start]),
        'add_partial': add_partial,
        'pack': lambda part: numpy.multiply(
            ones[:part.stop - part.start], numpy.float32(0.25),
            out=half[:part.stop - part.start], casting='same_kind'),
        'mean': encode_mean}


def _rate(comm, action):
    """Elements per second of a core, without what the interpreter adds.

    An exchange does the same in compiled code.
    """
    starts = range(0, SIZE, FRAME)
    frames = [slice(start, min(start + FRAME, SIZE)) for start in starts]
    calls = [slice(start, start + OVERHEAD) for start in starts]
    seconds = []
    for _ in range(REPEATS + 1):
        comm.Barrier()
        seconds.append(_seconds(action, frames) - _seconds(action, calls))
        # Not on a core where others are still at work.
        done = comm.Ibarrier()
        wait_until(done.Test)
    median = float(numpy.median(seconds[1:]))
    return SIZE / (comm.allreduce(median) / comm.size)


def _seconds(action, parts):
    """Of this rank on its core; others may have the core in between."""
    start = time.thread_time()
    for part in parts:
        action(part)
    return time.thread_time() - start
