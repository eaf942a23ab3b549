"""Random exchanges of gradients: models, codecs, algorithms, overlap.

    python benchmarks/exchange_fuzz.py --seconds 600

Jobs of 1 to 4 ranks run cases one after the other.  Each case draws its
options from its own number.  After every update the means must have the same
bits on all ranks and be near the mean in float64.

A case that fails is shown with the command that runs it again.
"""
from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import time
import traceback

from chainer_fp8pipe.allreduce.plan import ALGORITHMS
from chainer_fp8pipe.codecs import CODECS

from environment import mpiexec

#: Seconds that a job goes on with new cases, and that the last may take.
JOB, CASE = 40, 240
SIZES = (0, 1, 2, 5, 31, 32, 33, 63, 65, 127, 129, 255, 1000, 4096, 5000,
         20_000, 70_001)
KINDS = {'normal': 1e-2, 'tiny': 1e-12, 'denormal': 1e-41, 'large': 1e3,
         'zeros': 0.0, 'sparse': 1e-2}
#: Largest error of the sum of means, beside the norm of what was summed.
ERRORS = {'float32': 1e-5, 'float16': 0.01, 'fp8': 0.4, 'int4': 0.9}
UPDATES = 7


# --- what a rank does --------------------------------------------------------

def draw(number: int, ranks: int) -> tuple[str, dict, list[int], dict]:
    """Name and options of the communicator, sizes of parameters, and more."""
    pick = random.Random(f'{number} {ranks}')
    name = pick.choice(('fp8', 'fp8', 'int4', 'float16', 'float32'))
    block = name.startswith('int')
    row = pick.choice([row for row in ALGORITHMS.values()
                       if not row.has_servers and (row.plan or not block)])
    options: dict = {
        'algorithm': row.name, 'check_every': 2,
        'bucket_bytes': pick.choice((0, 64, 4096, 1 << 22))}
    if row.plan:
        options |= {
            'frame_bytes': pick.choice((0, 1, 64, 333, 4096, 3 << 14)),
            'shared_memory': pick.random() < .7,
            'overlap': pick.choice((False, True))}
    if row.two_level and ranks % 2 == 0:
        options |= {'ranks_per_node': pick.choice((0, 1, 2)),
                    'two_level': pick.choice(('auto', 'no'))}
    if CODECS[name].error_feedback:
        options |= {'warmup': pick.choice((0, 0, 2)),
                    'error_feedback': pick.random() < .7}
    if name == 'fp8':
        options['period'] = pick.choice((1, 3, 100))
    # Frames of a few bytes are many.
    most = {1: 255, 64: 5000}.get(options.get('frame_bytes', 0), 1 << 30)
    sizes = [min(pick.choice(SIZES), most)
             for _ in range(pick.randint(1, 6))]
    return name, options, sizes, {
        'kind': pick.choice(tuple(KINDS)), 'looks': pick.random() < .7,
        'zero': pick.random() < .2}


class Case:
    """A model that is trained, and what its means must be."""

    def __init__(self, comm, number: int) -> None:
        from chainer_fp8pipe import create_communicator

        import chainer
        import chainermn
        import numpy
        self.comm = comm
        self.name, self.options, sizes, self.more = draw(number, comm.size)
        self.communicator = create_communicator(self.name, comm,
                                                **self.options)
        values = numpy.random.RandomState(number)
        self.model = chainer.Link()
        with self.model.init_scope():
            for place, size in enumerate(sizes):
                value = values.randn(size) * .1 * (not self.more['zero'])
                setattr(self.model, f'p{place}',
                        chainer.Parameter(value.astype('f4')))
        self.optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(1e-3), self.communicator)
        self.optimizer.setup(self.model).update()       # only broadcasts
        self.own = numpy.random.RandomState([number, comm.rank])
        self.sums = {key: (0.0, 0.0, 0.0)       # found, mean, of magnitudes
                     for key, _ in self.model.namedparams()}

    def run(self) -> None:
        """Raises AssertionError where a mean is wrong."""
        for _ in range(UPDATES):
            gradients = {key: self.draw_gradient(parameter.size)
                         for key, parameter in self.model.namedparams()}
            self.update(gradients)
            if self.more['looks']:
                self.look(gradients)
        for key, parameter in self.model.namedparams():
            self.check_bits(key, parameter.array)
        self.communicator.finalize()
        self.check_sums()

    def draw_gradient(self, size: int):
        found = self.own.randn(size).astype('f4')
        if self.more['kind'] == 'sparse':
            found[self.own.rand(size) < .99] = 0
        return found * found.dtype.type(KINDS[self.more['kind']])

    def update(self, gradients: dict) -> None:
        import chainer.functions as F
        self.optimizer.update(lambda: sum(
            F.sum(parameter * gradients[key])
            for key, parameter in self.model.namedparams()))

    def look(self, gradients: dict) -> None:
        for key, parameter in self.model.namedparams():
            everyone = self.comm.allgather(gradients[key].astype('f8'))
            self.check_bits(key, parameter.grad)
            assert self.more['kind'] != 'zeros' or not parameter.grad.any(), (
                f'{key}: 0 becomes another number')
            found, mean, norms = self.sums[key]
            self.sums[key] = (
                found + parameter.grad.astype('f8'),
                mean + sum(everyone) / self.comm.size,
                norms + sum(map(abs, everyone)) / self.comm.size)

    def check_bits(self, key: str, array) -> None:
        assert (array - array == 0).all(), f'{key} is not finite'
        assert len(set(self.comm.allgather(array.tobytes()))) == 1, (
            f'the bits of {key} differ between ranks')

    def check_sums(self) -> None:
        # Values below the smallest of a format, and above the largest, are
        # lost; a few do not make up for each other.
        if (self.more['kind'] not in ('normal', 'large')
                or not self.more['looks']):
            return
        for key, (found, mean, norms) in self.sums.items():
            error = ((found - mean) ** 2).sum() ** .5
            bound = (norms ** 2).sum() ** .5 * ERRORS[self.name]
            assert error <= bound or found.size < 32, (
                f'{key}: an error of {error:.3g} is more than {bound:.3g}')


def run_rank(first: int) -> None:
    """Runs cases from a number on, for some time."""
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    end, number = time.monotonic() + JOB, first
    while number == first or comm.bcast(time.monotonic() < end):
        if comm.rank == 0:
            print('case', number, flush=True)
        try:
            Case(comm, number).run()
        except BaseException:
            traceback.print_exc()
            print('drawn:', draw(number, comm.size), file=sys.stderr,
                  flush=True)
            comm.Abort(1)
        number += 1
    if comm.rank == 0:
        print('done', flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--seconds', type=float, default=60)
    parser.add_argument('--first', type=int, default=0, metavar='N',
                        help='number of the first case (default: 0)')
    parser.add_argument('--ranks', type=int, help='of each job')
    parser.add_argument('--rank', action='store_true',
                        help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.first)
        return 0
    end, first = time.monotonic() + options.seconds, options.first
    failures = turn = 0
    while not turn or time.monotonic() < end:
        ranks = options.ranks or (2, 3, 4, 1)[turn % 4]
        turn += 1
        try:
            said = subprocess.run(
                [*mpiexec(ranks), sys.executable, __file__, '--rank',
                 '--first', str(first)], text=True, errors='replace',
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                timeout=JOB + CASE).stdout
        except subprocess.TimeoutExpired as error:
            said = f'{error.output}\nnothing has come for {CASE} seconds'
        last = int((re.findall(r'(?m)^case (\d+)$', said) or [first])[-1])
        if not said.endswith('done\n'):
            failures += 1
            print(said[-4000:], f'case {last} has failed:\npython benchmarks/'
                  f'exchange_fuzz.py --ranks {ranks} --first {last}', sep='\n')
        first = last + 1
        print(f'{first - options.first} cases, {failures} failed', flush=True)
    return int(failures > 0)


if __name__ == '__main__':
    sys.exit(main())
