"""Processor time of stages, and of calls that a rank does not do."""
from __future__ import annotations

import functools
import statistics
import time

from chainer_fp8pipe.chains.partitioned import Form
from chainer_fp8pipe.pipeline.chunk import Chunk
from chainer_fp8pipe.pipeline.randomness import Place, preserved

from mpi4py import MPI
from partition_sizes import cut, made, part, reported

_PARTS = 4
_WARM_UP = 2        # updates
_PLACE = Place(0, 0, 0, 0)


class _Clock:
    """Processor time of this rank's forward and backward passes."""

    def __init__(self):
        self.seconds = 0.0
        self._before = {}

    def __enter__(self):
        for name in ('forward', 'backward'):
            self._before[name] = original = getattr(Chunk, name)
            setattr(Chunk, name, self._timed(original))
        return self

    def __exit__(self, *_):
        for name, original in self._before.items():
            setattr(Chunk, name, original)

    def _timed(self, original):
        def run(*args, **kwargs):
            start = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start
        return run


def balance(comm, job, rows):
    """A row for each model."""
    for name in job['models']:
        model, batch = made(name, job['scale'])
        updater = cut(model, batch, comm, _PARTS)
        row = {'model': name, 'stages': comm.size,
               **_as_run(comm, model, reported(updater), job['updates'])}
        program, = {id(one): one for one in updater._work._programs}.values()
        row['calls'] = len(program.trace.calls)
        row['cuts'] = list(model.plan.cuts)
        rows.add(row, f'{comm.size} stages, {name}: {row["run"]:.3f}')


def _as_run(comm, model, update, updates):
    for _ in range(_WARM_UP):
        update()
    seconds = []
    for _ in range(updates):
        with _Clock() as clock:
            update()
        seconds.append(clock.seconds)
    busy = comm.allgather(statistics.median(seconds))
    return {'predicted': _evenness(model.plan.predicted.busy),
            'run': _evenness(busy), 'busy': busy}


def _evenness(busy):
    return sum(busy) / len(busy) / max(busy)


def ghosts(comm, job, rows):
    """A row for each model: one rank does it all, then none of it."""
    for name in job['models']:
        model, batch = made(name, job['scale'])
        updater = cut(model, batch, MPI.COMM_SELF, _PARTS)
        update = reported(updater)
        update()
        step, ghost, rehearsal = [], [], []
        part_of, form = model.partition, Form(
            model, part(batch, _PARTS), {}, None, _PLACE)
        with preserved():
            program, _ = part_of.rehearsed('train', form)
        # No call belongs to this chunk, and nothing of it is wanted.
        program.wanted = (*program.wanted, frozenset())
        passes = part_of.passes
        for _ in range(job['rounds']):
            step.append(_timed(update))
            with preserved():
                rehearsal.append(_timed(functools.partial(
                    part_of.rehearsed, 'train', form)))
                passes.begin('train', [program], [form.call])
                ghost.append(_timed(functools.partial(
                    passes.run, 0, 1, {}, _PLACE)))
        rows.add({'model': name, 'calls': len(program.trace.calls),
                  'micro_batches': _PARTS, 'step': step, 'ghost': ghost,
                  'rehearsal': rehearsal}, name)


def _timed(action):
    start = time.thread_time()
    action()
    return time.thread_time() - start
