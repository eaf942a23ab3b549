"""How long an array takes from one rank to another and back.

    mpiexec -n 2 .venv/bin/python benchmarks/channel.py

sends one float32 array of 4 KB to 4 MB to and fro in ways that take turns:
by a channel of the pipeline, by ChainerMN's ``send`` and ``recv``, and by
nothing but MPI, into buffers that both sides know beforehand, which is the
least that it can take.  A channel gives a new array for each message, as
ChainerMN does, because a pipeline keeps them for its backward pass.
"""
from __future__ import annotations

import statistics
import sys
import time
import warnings

from chainer_fp8pipe.channel.channel import Receiver, Sender
from chainer_fp8pipe.mpi.world import enter_world

import chainermn
import numpy
from environment import describe, parser, write_json
from mpi4py import MPI

SHARE = 0.2         # of ChainerMN's time, at most, at the smallest size
SIZES = [2 ** power for power in range(12, 23, 2)]      # bytes
ROUNDS = 20         # to and fro, before it is another way's turn


class Channel:
    """This package's."""

    def __init__(self, comm: MPI.Comm, size: int) -> None:
        self._sender = Sender(comm, 1 - comm.rank, 0)
        self._receiver = Receiver(comm, 1 - comm.rank, 0)

    def begin(self, count: int) -> None:
        self._receiver.expect(count)

    def send(self, array: numpy.ndarray) -> None:
        self._sender.send((array,))

    def receive(self) -> numpy.ndarray:
        return self._receiver.receive()[0]

    def end(self) -> None:
        self._sender.flush()


class ChainerMN:
    """ChainerMN's point-to-point functions."""

    def __init__(self, comm: MPI.Comm, size: int) -> None:
        self._comm = chainermn.create_communicator('naive', mpi_comm=comm)
        self._other = 1 - comm.rank

    def begin(self, count: int) -> None:
        pass

    def send(self, array: numpy.ndarray) -> None:
        self._comm.send(array, self._other, 0)

    def receive(self) -> numpy.ndarray:
        return self._comm.recv(self._other, 0)

    def end(self) -> None:
        pass


class Mpi:
    """MPI alone."""

    def __init__(self, comm: MPI.Comm, size: int) -> None:
        self._comm, self._other = comm, 1 - comm.rank
        self._into = numpy.empty(size // 4, numpy.float32)
        self._sending = MPI.REQUEST_NULL

    def begin(self, count: int) -> None:
        pass

    def send(self, array: numpy.ndarray) -> None:
        self._sending.Wait()
        self._sending = self._comm.Isend(array, self._other)

    def receive(self) -> numpy.ndarray:
        self._comm.Recv(self._into, self._other)
        return self._into

    def end(self) -> None:
        self._sending.Wait()


WAYS = {'channel': Channel, 'ChainerMN': ChainerMN, 'MPI': Mpi}
Way = Channel | ChainerMN | Mpi
Seconds = dict[str, dict[int, list[float]]]


def to_and_fro(comm: MPI.Comm, way: Way, array: numpy.ndarray,
               rounds: int) -> list[float]:
    """Seconds of each round on rank 0; rank 1 returns what it gets."""
    seconds = []
    way.begin(rounds)
    comm.Barrier()
    for _ in range(rounds):
        if comm.rank == 0:
            start = time.perf_counter()
            way.send(array)
            back = way.receive()
            seconds.append(time.perf_counter() - start)
        else:
            back = way.receive()
            way.send(back)
    way.end()
    comm.Barrier()
    if not numpy.array_equal(back, array):
        raise RuntimeError(f'{way} did not bring back what was sent')
    return seconds


def measure(comm: MPI.Comm, turns: int) -> Seconds:
    """Seconds of every round, by way and by bytes of the array."""
    seconds: Seconds = {name: {} for name in WAYS}
    for size in SIZES:
        array = numpy.arange(size // 4, dtype=numpy.float32)
        ways = {name: way(comm.Dup(), size) for name, way in WAYS.items()}
        for name, way in ways.items():
            to_and_fro(comm, way, array, ROUNDS)        # first time is slower
            seconds[name][size] = []
        for _ in range(turns):
            for name, way in ways.items():
                seconds[name][size] += to_and_fro(comm, way, array, ROUNDS)
    return seconds


def table(seconds: Seconds) -> str:
    """Medians, quartiles, and the shares of the others' medians."""
    lines = [f'{"":8}' + ''.join(f'{name + " [us]":>26}' for name in WAYS)
             + f'{"x ChainerMN":>13}{"x MPI":>8}']
    for size in SIZES:
        line, medians = f'{size // 1024:5} KB', []
        for name in WAYS:
            low, median, high = (
                1e6 * t for t in statistics.quantiles(seconds[name][size]))
            spread = f'({low:.1f} - {high:.1f})'
            line += f'{median:9.1f} {spread:16}'
            medians.append(median)
        ours, chainermns, mpis = medians
        lines.append(f'{line}{ours / chainermns:13.3f}{ours / mpis:8.2f}')
    return '\n'.join(lines)


def verdict(seconds: Seconds) -> str:
    """Whether the smallest array takes as little as it should."""
    size = SIZES[0]
    share = (statistics.median(seconds['channel'][size])
             / statistics.median(seconds['ChainerMN'][size]))
    return (f"{size // 1024} KB: {share:.3f} of ChainerMN's time "
            f'(<= {SHARE} {"ok" if share <= SHARE else "short"})')


def main() -> None:
    given = parser(__doc__)
    given.add_argument(
        '--turns', type=int, default=25, metavar='N',
        help=f'of each way and size, {ROUNDS} rounds each (default: 25)')
    args = given.parse_args()
    comm = MPI.COMM_WORLD
    if comm.size != 2:
        sys.exit('this takes two ranks: mpiexec -n 2 python '
                 'benchmarks/channel.py')
    enter_world()
    # ChainerMN says at each call that it is experimental.
    warnings.simplefilter('ignore', FutureWarning)
    seconds = measure(comm, args.turns)
    if comm.rank == 0:
        print(describe())
        print(f'to and fro, medians (and quartiles) of '
              f'{args.turns * ROUNDS} rounds\n')
        print(table(seconds))
        print(f'\n{verdict(seconds)}')
        if args.json:
            write_json(args.json, {'seconds': seconds})


if __name__ == '__main__':
    main()
