"""The largest encoder under a limit, and what its training takes."""
from __future__ import annotations

import gc

from chainer_fp8pipe import deferred, partition
from chainer_fp8pipe.planner.own_memory import forget_peak
from chainer_fp8pipe.planning.partition.cuts import DoesNotFit
from chainer_fp8pipe.planning.sizes import parse_bytes
from chainer_fp8pipe.report.process_memory import bytes_in

import chainer
from models.encoder import Encoder
from partition_sizes import LENGTH, encoder_batch, part, reported, trained

_PARTS, _SAMPLES = 4, 16


def accepted(comm, job, rows):
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
    rows.add({'ranks': comm.size, 'layers': low, 'reason': reason},
             f'{comm.size} ranks: {low} layers fit')


def resident(comm, job, rows):
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
    rows.add({'ranks': comm.size, 'parameters': parameters,
              'limit': parse_bytes(job['memory']),
              'predicted': list(plan.predicted.memory),
              'measured': comm.allgather(measured),
              'while planning': comm.allgather(planning),
              'planning is in it': not forgot,
              'recompute': list(plan.recompute)},
             f'{comm.size} ranks: trained')


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
