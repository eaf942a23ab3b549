"""What a core does per second while all ranks of a machine work.

A core that is alone has the memory for itself; ranks that encode and sum at
the same time do not.  The model is given what is measured here.
"""
from __future__ import annotations

import functools
import os
import time

from chainer_fp8pipe.mpi.waiting import wait_until
from chainer_fp8pipe.planner.codec.codec_rates import operation_rates
from chainer_fp8pipe.planning.job.codec_choice import FRAME_BYTES

import numpy
from mpi4py import MPI

SECONDS = 2.0           # for the rates of a codec
SHORT = 1 << 10, 1 << 13        # bytes that no link makes wait, one by one
APART = 5e-3            # seconds
MANY = 32               # messages
PAIRS = 101             # of times that are compared


def core_rates(comm):
    """Elements per second by codec and operation, of one core.

    All ranks do the same at the same time, as an exchange does; ``comm`` is
    of ranks that share a machine.
    """
    return {name: {operation: rate.value for operation, rate in
                   operation_rates(comm, name, SECONDS).items()}
            for name in ('fp8', 'float32')}


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
            for size, count in ((1, MANY), (1, 2), (FRAME_BYTES, 2)))
        messages.append(many - few)
        bytes_.append(long - few)
    message = max(float(numpy.median(messages)), 0.0) / ends / (MANY - 2)
    byte = max(float(numpy.median(bytes_)), 0.0) / ends / 2 / FRAME_BYTES
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
