"""What the ranks of ``benchmarks/partition.py`` do; it starts them."""
from __future__ import annotations

import contextlib
import gc
import os
import sys

from chainer_fp8pipe import PipelineUpdater, deferred, partition
from chainer_fp8pipe.chains.cuts import DoesNotFit
from chainer_fp8pipe.planner.example import Repeating, as_it_is
from chainer_fp8pipe.report.quantities import bytes_in, parse_bytes

import chainer
import numpy
from environment import as_rank
from pipeline_ranks import start_torch, take_turns

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tests.models.encoder import Encoder

# --- the models -----------------------------------------------------------

LAYERS, HEADS, VOCABULARY, LENGTH = 12, 4, 1000, 32


def units(scale):
    """Of the encoder: 256, or as many as a scale says."""
    return max(int(64 * scale), 1) * HEADS


def encoder(scale):
    """A masked language model of 12 layers: 10 million parameters."""
    numpy.random.seed(0)
    return Encoder(VOCABULARY, units(scale), HEADS, LAYERS, LENGTH)


def encoder_batch(scale=1.0, samples=16):
    """Tokens without padding; seven of ten are not asked for."""
    rng = numpy.random.RandomState(0)
    tokens = rng.randint(0, VOCABULARY, (samples, LENGTH)).astype('i')
    targets = rng.randint(0, VOCABULARY, (samples, LENGTH)).astype('i')
    targets[rng.uniform(size=targets.shape) < .7] = -1
    targets[:, 0] = 0
    return tokens, targets


def part(batch, parts):
    """The first micro-batch."""
    return tuple(array[:len(array) // parts] for array in batch)


def cut(model, batch, comm, parts, **options):
    """A model over the ranks, and the update of a step."""
    partition(model, part(batch, parts), comm, micro_batches=parts,
              **{'optimizer': chainer.optimizers.SGD(), **options})
    return trained(model, batch, comm, parts)


def trained(model, batch, comm, parts, optimizer=None, **options):
    """An updater with one batch for ever."""
    optimizer = optimizer or chainer.optimizers.SGD(1e-4).setup(model)
    return PipelineUpdater(
        Repeating(batch), optimizer, comm, micro_batches=parts,
        converter=as_it_is, **options)


def reporter_of(model):
    """Takes what the links of a model report."""
    reporter = chainer.Reporter()
    reporter.add_observer('main', model)
    reporter.add_observers('main', model.namedlinks(skipself=True))
    return reporter


def reported(updater):
    """Updates without a word of what links report."""
    reporter = reporter_of(updater.get_optimizer('main').target)

    def update():
        with reporter:
            updater.update()
    return update


# --- speed ------------------------------------------------------------------

#: Ways to cut, with their options.
WAYS = {'1f1b': {},
        'zero_bubble, 2 chunks': {'schedule': 'zero_bubble', 'chunks': 2}}
_SETTLED = 4        # updates before those that are timed


def speed(comm, job):
    """Seconds of each way to train the encoder; the ways take turns."""
    torch = start_torch() if job['torch'] else None
    scale, parts = job['scale'], job['micro_batches']
    batch, before, notes = encoder_batch(scale), 0, []
    steps = {'serial': _serial(comm, scale),
             'serial, the same micro-batches': _serial(comm, scale, parts)}
    for what, options in WAYS.items():
        model = encoder(scale)
        update = reported(cut(model, batch, comm, parts, **options))
        for _ in range(_SETTLED):
            update()
        steps[f'partition, {what}'] = update
        notes.append(f'{what}: {_said(model)}')
        before = before or _layers_before(model.plan)
    if torch:
        steps['PyTorch, serial'] = _torch_serial(torch, comm, batch, scale)
        steps['PyTorch, the same cut'] = _torch_step(
            torch, comm, before, batch, parts, scale)
    times = take_turns(steps, job['rounds'])
    if torch:
        torch.distributed.destroy_process_group()
    return {'times': times, 'notes': notes}


def _say(comm, text):
    if comm.rank == 0:
        print(f'  {text}', file=sys.stderr, flush=True)


def _said(model):
    busy = model.plan.predicted.busy
    return f'balance {sum(busy) / len(busy) / max(busy):.2f}'


def _serial(comm, scale, parts=1):
    """A step of plain Chainer on rank 0; the others sleep meanwhile."""
    if comm.rank:
        return None
    model, batch = encoder(scale), encoder_batch(scale)
    optimizer = chainer.optimizers.SGD(1e-4).setup(model)
    reporter = reporter_of(model)

    def step():
        model.cleargrads()
        size = len(batch[0]) // parts
        with reporter:
            for start in range(0, len(batch[0]), size):
                model(*[array[start:start + size]
                        for array in batch]).backward()
        optimizer.update()
    return step


def _layers_before(plan):
    """Whole layers before a plan's cut, or nearest to it."""
    path = plan.as_dict()['cuts'][0]['before'].strip('/').split('/')
    if path[0] == 'layers':
        return int(path[1]) + (path[2] in ('ln2', 'wide', 'narrow'))
    return LAYERS if path[0] in ('ln', 'bias') else 0


# --- PyTorch -----------------------------------------------------------------

def _torch_step(torch, comm, before, batch, parts, scale):
    """The same layers and cut, by torch.distributed.pipelining."""
    from torch.distributed import pipelining
    layers = _torch_layers(torch, units(scale))
    mine = (layers[:1 + before], layers[1 + before:])[comm.rank]
    module = torch.nn.Sequential(*mine)
    stage = pipelining.PipelineStage(module, comm.rank, comm.size,
                                     torch.device('cpu'))

    def loss(y, t):
        return torch.nn.functional.cross_entropy(
            y.reshape(-1, VOCABULARY), t.reshape(-1), ignore_index=-1)
    schedule = pipelining.Schedule1F1B(stage, parts, loss_fn=loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    tokens, targets = (torch.from_numpy(array).long() for array in batch)

    def step():
        optimizer.zero_grad()
        if comm.rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=[])
        optimizer.step()
    return step


def _torch_serial(torch, comm, batch, scale):
    """A step of the same layers on rank 0."""
    if comm.rank:
        return None
    module = torch.nn.Sequential(*_torch_layers(torch, units(scale)))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    tokens, targets = (torch.from_numpy(array).long() for array in batch)

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            module(tokens).reshape(-1, VOCABULARY), targets.reshape(-1),
            ignore_index=-1).backward()
        optimizer.step()
    return step


def _torch_layers(torch, width):
    nn = torch.nn

    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, width)
            self.position = nn.Embedding(LENGTH, width)
            self.dropout = nn.Dropout(.1)

        def forward(self, tokens):
            at = torch.arange(tokens.shape[1])
            return self.dropout(self.embed(tokens) * width ** .5
                                + self.position(at))
    return [Embedding(), *[nn.TransformerEncoderLayer(
        width, HEADS, 4 * width, .1, norm_first=True, batch_first=True)
        for _ in range(LAYERS)],
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))]


# --- memory -----------------------------------------------------------------

_PARTS, _SAMPLES = 4, 16


def accepted(comm, job):
    """How many layers there can be; found by halving."""
    low, high, reason = 0, 1, ''
    while high <= job['most']:
        fits, reason = _fits(comm, job, high)
        if not fits:
            break
        low, high = high, high * 2
    high = min(high, job['most'] + 1)
    while high - low > 1:
        middle = (low + high) // 2
        fits, _ = _fits(comm, job, middle)
        low, high = (middle, high) if fits else (low, middle)
    _say(comm, f'{comm.size} ranks: {low} layers fit')
    return {'ranks': comm.size, 'layers': low, 'reason': reason}


def forget_peak():
    """Makes what is in memory now the peak; whether the system allows that."""
    with contextlib.suppress(OSError), open(
            '/proc/self/clear_refs', 'w') as file:
        file.write('5')
        return True
    return False


def resident(comm, job):
    """Bytes of this rank while it trains, beyond those before."""
    forget_peak()
    before = bytes_in('VmRSS')
    model, batch = _made(job)
    parameters = sum(parameter.size * 4 for parameter in model.params())
    partition(model, part(batch, _PARTS), comm, memory=job['memory'],
              micro_batches=_PARTS)
    optimizer = chainer.optimizers.Adam(1e-6).setup(model)
    update = reported(trained(model, batch, comm, _PARTS, optimizer))
    gc.collect()
    planning = bytes_in('VmHWM') - before
    forgot = forget_peak()
    for _ in range(job['updates']):
        update()
    measured = bytes_in('VmHWM') - before
    plan = model.plan
    return {'ranks': comm.size, 'parameters': parameters,
            'limit': parse_bytes(job['memory']),
            'predicted': list(plan.predicted.memory),
            'measured': comm.allgather(measured),
            'while planning': comm.allgather(planning),
            'planning is in it': not forgot,
            'recompute': list(plan.recompute)}


def _made(job):
    with deferred():
        model = Encoder(1000, job['units'], 4, job['layers'], LENGTH)
    return model, encoder_batch(samples=_SAMPLES)


def _fits(comm, job, layers):
    model, batch = _made({**job, 'layers': layers})
    try:
        partition(model, part(batch, _PARTS), comm, memory=job['memory'],
                  micro_batches=_PARTS)
    except DoesNotFit as error:
        return False, str(error)
    except ValueError as error:
        if 'parts at most' not in str(error):
            raise
        return False, str(error)
    finally:
        del model
        gc.collect()
    return True, ''


if __name__ == '__main__':
    as_rank(lambda comm, job: globals()[job['what']](comm, job))
