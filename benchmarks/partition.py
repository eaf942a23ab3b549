"""Any Chain, cut by itself: is it small and fast enough.

    python benchmarks/partition.py memory       # limits, kept and predicted
    python benchmarks/partition.py speed        # serial Chainer, and PyTorch

The model is a transformer encoder, which knows nothing of this package.
``memory`` finds the most layers that a limit allows, and measures what ranks
then take.  ``speed`` times a step over two ranks, turn by turn.  Whether a cut
model is right, tests/models tells.
"""
from __future__ import annotations

import bisect
import contextlib
import gc
import os
import statistics
import sys

from chainer_fp8pipe import PipelineUpdater, deferred, partition
from chainer_fp8pipe.chains.cuts import DoesNotFit
from chainer_fp8pipe.report.quantities import parse_bytes

import chainer
import numpy
from chainer.iterators import SerialIterator
from environment import (
    ONE_THREAD,
    describe,
    milliseconds,
    parser,
    ranks_of,
    start,
    with_torch,
)
from pipeline import start_torch, take_turns

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tests.models.encoder import Encoder

LAYERS, UNITS, HEADS, VOCABULARY, LENGTH, SAMPLES = 12, 256, 4, 1000, 32, 16
PARTS = 4           # micro-batches
UPDATES = 4         # before those that are timed, and while memory is measured
#: Ways to cut, with their options.
WAYS = {'1f1b': {},
        'zero_bubble, 2 chunks': {'schedule': 'zero_bubble', 'chunks': 2}}


def batch():
    """Tokens without padding; seven of ten are not asked for."""
    rng = numpy.random.RandomState(0)
    tokens, targets = rng.randint(
        0, VOCABULARY, (2, SAMPLES, LENGTH)).astype('i')
    targets[rng.uniform(size=targets.shape) < .7] = -1
    targets[:, 0] = 0
    return tokens, targets


def trained(model, comm, optimizer, **options):
    """What cuts a model over the ranks has done; the update of a step."""
    example = tuple(array[:SAMPLES // PARTS] for array in batch())
    partition(model, example, comm, micro_batches=PARTS, **options)
    return PipelineUpdater(
        SerialIterator([batch()], 1), optimizer.setup(model), comm,
        micro_batches=PARTS, converter=lambda found, _: found[0]).update


def rank(comm, job):
    return globals()[job['what']](comm, job)


# --- memory ------------------------------------------------------------------

def accepted(comm, job):
    """How many layers there can be; found by halving."""
    def is_too_much(layers):
        model = deep(job['units'], layers)
        try:
            trained(model, comm, chainer.optimizers.Adam(),
                    memory=job['memory'])
        except DoesNotFit as error:
            job['reason'] = str(error)
            return True
        except ValueError as error:
            if 'parts at most' not in str(error):   # than there are ranks
                raise
            job['reason'] = str(error)
            return True
        finally:
            gc.collect()
        return False
    high = 1
    while not is_too_much(high):
        high *= 2
    layers = high // 2 + bisect.bisect_left(
        range(high // 2 + 1, high), True, key=is_too_much)
    return {'ranks': comm.size, 'layers': layers, 'reason': job['reason']}


def deep(units, layers):
    with deferred():
        return Encoder(VOCABULARY, units, HEADS, layers, LENGTH)


def resident(comm, job):
    """Bytes of each rank while it trains, beyond those before."""
    before = in_memory('VmRSS')
    model = deep(job['units'], job['layers'])
    parameters = 4 * model.count_params()
    update = trained(model, comm, chainer.optimizers.Adam(1e-6),
                     memory=job['memory'])
    gc.collect()
    with contextlib.suppress(OSError), open(
            '/proc/self/clear_refs', 'w') as file:
        file.write('5')         # what planning took is no part of the peak
    for _ in range(UPDATES):
        update()
    return {'ranks': comm.size, 'parameters': parameters,
            'limit': parse_bytes(job['memory']),
            'predicted': list(model.plan.memory),
            'measured': comm.allgather(in_memory('VmHWM') - before)}


def in_memory(field):
    """Bytes of this process, now or at most."""
    with open('/proc/self/status') as file:
        return next(1024 * int(line.split()[1]) for line in file
                    if line.startswith(field))


def show_memory(rows):
    print('\n               parameters     over 1 rank     '
          'MB per rank, the most of any\nranks  layers         '
          'MB       / n      limit  predicted  measured  over limit'
          '  off prediction')
    alone = next((row for row in rows if row['ranks'] == 1), None)
    for row in rows:
        share = (row['parameters'] / alone['parameters'] / row['ranks']
                 if alone else numpy.nan)
        most, limit = max(row['measured']), row['limit']
        off = max((found / said - 1 for found, said in zip(
            row['measured'], row['predicted'], strict=True)), key=abs)
        print(f'{row["ranks"]:5} {row["layers"]:7} '
              f'{row["parameters"] / 1e6:10.1f} {share:14.2f} '
              f'{limit / 1e6:10.0f} {max(row["predicted"]) / 1e6:10.0f} '
              f'{most / 1e6:9.0f} {100 * (most / limit - 1):+9.1f} % '
              f'{100 * off:+13.1f} %')


# --- speed -------------------------------------------------------------------

def speed(comm, job):
    """Seconds of each way to train the encoder; the ways take turns."""
    torch = start_torch() if job['torch'] else None
    steps = {'serial': serial(comm)}
    for what, options in reversed(WAYS.items()):
        model = encoder()
        steps[f'partition, {what}'] = update = trained(
            model, comm, chainer.optimizers.SGD(1e-4), **options)
        for _ in range(UPDATES):
            update()
    if torch:
        steps['PyTorch, serial'] = torch_serial(torch, comm)
        steps['PyTorch, the same cut'] = torch_cut(
            torch, comm, layers_before(model.plan))     # of 1f1b
    times = take_turns(steps, job['rounds'])
    if torch:
        torch.distributed.destroy_process_group()
    return times


def encoder():
    """A masked language model of 12 layers: 10 million parameters."""
    numpy.random.seed(0)
    return Encoder(VOCABULARY, UNITS, HEADS, LAYERS, LENGTH)


def serial(comm):
    """A step of plain Chainer on rank 0; the others sleep meanwhile."""
    if comm.rank:
        return None
    model = encoder()
    optimizer = chainer.optimizers.SGD(1e-4).setup(model)
    return lambda: optimizer.update(model, *batch())


def layers_before(plan):
    """Whole layers before a plan's cut, or nearest to it."""
    path = plan.order[plan.cuts[0][0]][0].strip('/').split('/')
    if path[0] == 'layers':
        return int(path[1]) + (path[2] in ('ln2', 'wide', 'narrow'))
    return LAYERS if path[0] in ('ln', 'bias') else 0


def torch_cut(torch, comm, before):
    """The same layers and cut, by torch.distributed.pipelining."""
    from torch.distributed import pipelining
    layers = torch_layers(torch)
    module = torch.nn.Sequential(*(
        layers[:1 + before], layers[1 + before:])[comm.rank])
    stage = pipelining.PipelineStage(module, comm.rank, comm.size,
                                     torch.device('cpu'))
    schedule = pipelining.Schedule1F1B(
        stage, PARTS, loss_fn=lambda y, t: torch_loss(torch, y, t))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    tokens, targets = (torch.from_numpy(array).long() for array in batch())

    def step():
        optimizer.zero_grad()
        if comm.rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=[])
        optimizer.step()
    return step


def torch_serial(torch, comm):
    """A step of the same layers on rank 0."""
    if comm.rank:
        return None
    module = torch.nn.Sequential(*torch_layers(torch))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    tokens, targets = (torch.from_numpy(array).long() for array in batch())

    def step():
        optimizer.zero_grad()
        torch_loss(torch, module(tokens), targets).backward()
        optimizer.step()
    return step


def torch_loss(torch, y, t):
    return torch.nn.functional.cross_entropy(
        y.reshape(-1, VOCABULARY), t.reshape(-1), ignore_index=-1)


def torch_layers(torch):
    nn = torch.nn

    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, UNITS)
            self.position = nn.Embedding(LENGTH, UNITS)
            self.dropout = nn.Dropout(.1)

        def forward(self, tokens):
            at = torch.arange(tokens.shape[1])
            return self.dropout(self.embed(tokens) * UNITS ** .5
                                + self.position(at))
    return [Embedding(), *[nn.TransformerEncoderLayer(
        UNITS, HEADS, 4 * UNITS, .1, norm_first=True, batch_first=True)
        for _ in range(LAYERS)],
        nn.Sequential(nn.LayerNorm(UNITS), nn.Linear(UNITS, VOCABULARY))]


def show_speed(found):
    print(f'\n{"":32} median [ms]       spread [ms]   speed-up')
    base = statistics.median(found['serial'])
    for what, times in found.items():
        print('{:32} {:>11} {:>17}'.format(what, *milliseconds(times))
              + f' {base / statistics.median(times):10.2f}')


def main():
    given = parser(__doc__, 'torch')
    given.add_argument('what', choices=['memory', 'speed'])
    given.add_argument('--ranks', type=int, nargs='+', default=[1, 2, 4, 6],
                       metavar='N', help='numbers of ranks (memory)')
    given.add_argument('--memory', default='400 MB', help='limit of a rank')
    given.add_argument('--units', type=int, default=512, metavar='N',
                       help='of the encoder under the limit (default: 512)')
    given.add_argument('--rounds', type=int, default=9, metavar='N',
                       help='steps of each that are timed (default: 9)')
    options = given.parse_args()
    print(describe(), flush=True)
    if options.what == 'speed':
        found = ranks_of('partition.py', {
            'what': 'speed', 'rounds': options.rounds,
            'torch': with_torch(not options.without_torch)}, 2)
        show_speed(found)
    else:
        found = []
        for ranks in options.ranks:
            job = {'memory': options.memory, 'units': options.units}
            row = ranks_of('partition.py', {**job, 'what': 'accepted'}, ranks)
            if not row['layers']:
                print(f'{ranks} ranks: no model fits: {row["reason"]}')
                continue
            # A process of its own: what the search took is not in it.  Freed
            # memory goes back, or it would count.
            found.append(row | ranks_of('partition.py', {
                **job, 'what': 'resident', 'layers': row['layers']}, ranks,
                env=ONE_THREAD))
        show_memory(found)


if __name__ == '__main__':
    start(main, rank)
