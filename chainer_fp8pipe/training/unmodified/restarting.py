"""Gives an unmodified script snapshots, and has it go on from the newest."""
# A script may run several Trainers, and leave out, when it is started again,
# those whose results are there.  So a Trainer is not known by its number in
# this start but by its ``out``, by its place in the script, and, where several
# have the same, by the parameters and data with which it begins.  The folders
# of all Trainers so far are in ``DIR/trainers.json``.  Where it cannot be told
# whose snapshots these are, the script is refused: a Trainer would go on with
# the weights of another one.
#
# ``chainermn.scatter_dataset(shuffle=True)`` without a seed would give each
# start other shares, of which an iterator's position says nothing: the seed is
# kept in ``DIR/seed.json``.
from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import linecache
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import chainermn
import numpy
from chainer.training.extensions import _snapshot
from chainer.training.triggers import IntervalTrigger, TimeTrigger
from mpi4py import MPI

from ...command_line import Interval
from ...intercept.patching import AroundCalls
from ...intercept.training_objects import Originals
from ...report.launch_protocol import LauncherLine, is_launched
from ...report.record import written_whole
from ..snapshots.file import digest_of, find_snapshots, iteration_of
from ..snapshots.snapshot import Snapshot, resume
from .launch import Refusal

_RETAIN = 2
_INDEX, _SEED = 'trainers.json', 'seed.json'
_SCATTER = inspect.signature(chainermn.scatter_dataset)
#: Items of an object that tell it from others, and how deep they may be.
_ITEMS, _DEPTH = 1000, 4


class Restarting(Originals):
    """Adds snapshots to a script's Trainers, and resumes them.

    A Trainer that has the package's ``Snapshot`` gets no other, and of what
    the script has resumed itself, and a newer snapshot, the newer one counts.
    One that runs in an extension of another one is a part of that.  Of a
    launched job, rank 0 tells the launcher of updates.

    Args:
        comm: All ranks.
        directory: Of the first Trainer's snapshots; those that follow have
            its folders ``2``, ``3`` and so on.  None: nothing is added.
        every: The interval between snapshots.
    """

    def __init__(self, comm: MPI.Comm, directory: str | None,
                 every: Interval) -> None:
        self._comm, self._every = comm, every
        # Before the script changes the working directory.
        self._directory = directory and os.path.abspath(directory)
        self._known = _KnownTrainers(self._directory or '')
        self._trains = self._has_trained = False
        # Of the shuffled shares of data sets, and how many there were.
        self._seed_file = os.path.join(self._directory or '', _SEED)
        self._seed, self._scattered = self._kept_seed(), 0

    def scatter(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Shuffles without the script's seed as at the first start."""
        bound = _SCATTER.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if (self._directory is not None and given['shuffle']
                and given['seed'] is None):
            if self._scattered == 0 and self._comm.rank == 0:
                os.makedirs(self._directory, exist_ok=True)
                with written_whole(self._seed_file) as file:
                    json.dump(self._seed, file)
            given['seed'] = int(numpy.random.SeedSequence(
                [self._seed, self._scattered]).generate_state(1)[0])
            self._scattered += 1
        return original(*bound.args, **bound.kwargs)

    def _kept_seed(self) -> int:
        seed = secrets.randbits(32)
        if self._directory is not None and self._comm.rank == 0:
            with contextlib.suppress(FileNotFoundError), open(
                    self._seed_file, encoding='utf-8') as file:
                seed = json.load(file)
        return self._comm.bcast(seed)

    def finish(self) -> None:
        """The script has ended; says if there is no snapshot of it."""
        if self._directory is not None and not self._has_trained:
            self._say('the script has run no chainer.training.Trainer, so '
                      '--snapshots has kept nothing')

    def update_optimizer(self, original: Callable, *args: Any, **kwargs: Any
                         ) -> None:
        """Refuses a training of which no snapshot would be taken."""
        if self._directory is not None and not self._has_trained:
            raise Refusal(
                'the script trains without a chainer.training.Trainer, so '
                '--snapshots would keep nothing; leave it out, or train by a '
                'Trainer')
        original(*args, **kwargs)

    def run_trainer(self, original: Callable, trainer: Any, *args: Any,
                    **kwargs: Any) -> None:
        """Prepares a Trainer when all else has been done to it."""
        if self._trains:
            original(trainer, *args, **kwargs)
            return
        self._trains = self._has_trained = True
        if self._directory is not None:
            self._add_snapshots(trainer)
        try:
            with (_telling_the_launcher(trainer.updater)
                  if is_launched() and self._comm.rank == 0
                  else contextlib.nullcontext()):
                original(trainer, *args, **kwargs)
        finally:
            self._trains = False
        self._known.note_end()

    def _add_snapshots(self, trainer: Any) -> None:
        own = next((entry.extension for entry in trainer._extensions.values()
                    if isinstance(entry.extension, Snapshot)), None)

        def choose() -> tuple[str, bool, str]:
            try:
                return *self._known.choose(
                    trainer, own and own.directory(trainer)), ''
            except Refusal as refusal:
                return '', False, str(refusal.code)
        directory, is_known, problem = self._comm.bcast(
            choose() if self._comm.rank == 0 else None)
        if problem:
            raise Refusal(problem)
        if own is not None:
            self._say(f'the Trainer has a Snapshot of its own; its snapshots '
                      f'are in {directory}, and --snapshots adds none')
        else:
            amount, unit = self._every
            trainer.extend(
                Snapshot(self._comm, _RETAIN, directory=directory),
                trigger=TimeTrigger(amount) if unit == 'second' else
                IntervalTrigger(amount if unit == 'epoch' else int(amount),
                                unit))
        found = find_snapshots(directory) if is_known else []
        newest = self._comm.bcast(iteration_of(found[-1]) if found else -1)
        update = trainer.updater.iteration
        if update and update >= newest:
            self._say(f'the script has resumed its Trainer at update {update} '
                      'itself; --snapshots resumes nothing')
            return
        if newest < 0:
            self._say(f'snapshots go to {directory}, where there is none '
                      'yet; the training begins')
            return
        update = resume(trainer, self._comm, directory, damaged='aside')
        for entry in trainer._extensions.values():
            # Or Chainer's own would now be loaded over it.
            if isinstance(entry.extension, _snapshot._Snapshot):
                entry.extension.autoload = False
        self._say(f'the training goes on after update {update}, by a '
                  f'snapshot in {directory}' if update else
                  'the training begins')

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            print(f'chainer_fp8pipe run: {text}', file=sys.stderr)


class _KnownTrainers:
    """The Trainers of this and earlier starts, in their order; on rank 0."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._path = os.path.join(directory, _INDEX)
        self._all: list[dict[str, Any]] = []
        self._last = -1             # of those that this start has run
        with contextlib.suppress(FileNotFoundError), open(
                self._path, encoding='utf-8') as file:
            self._all = json.load(file)

    def choose(self, trainer: Any, own: str | None) -> tuple[str, bool]:
        """A Trainer's folder, and whether snapshots in it are this one's.

        Args:
            trainer: That is about to run.
            own: The folder of its own ``Snapshot``, if it has one.

        Raises:
            Refusal: It cannot be told.
        """
        self.note_end()
        about = {'out': str(trainer.out), 'place': _place(),
                 'begins': _content_of(trainer)}
        number = self._number_of(about)
        is_new = number is None
        if number is None:
            number = len(self._all)
            folders = {one['folder'] for one in self._all}
            folder = own or self._directory
            if not own:
                for name in range(2, number + 3):
                    if folder not in folders:
                        break
                    folder = os.path.join(self._directory, str(name))
            # A script's own may be older than --snapshots.
            is_new = folder in folders
            self._all.append({'folder': folder})
        self._all[number] |= {**about, 'has_ended': False}
        self._last = number
        self._write()
        return own or self._all[number]['folder'], not is_new

    def note_end(self) -> None:
        """The last Trainer has ended, or an error of it was caught."""
        if self._last >= 0 and not self._all[self._last]['has_ended']:
            self._all[self._last]['has_ended'] = True
            self._write()

    def _number_of(self, about: dict[str, Any]) -> int | None:
        """Which of the known ones a Trainer is; None: a new one."""
        def alike(*names: str) -> list[int]:
            return [number for number, one in enumerate(self._all)
                    if all(one[name] == about[name] for name in names)]
        same = alike('out', 'place')
        left = [number for number in same if number > self._last]
        if len(same) == 1 and left:
            return left[0]
        if not same:        # the script, or its out, is another one now
            left = [number for number in {*alike('out'), *alike('place')}
                    if number > self._last
                    and not self._all[number]['has_ended']]
            if len(left) == 1 and left == alike('out'):
                return left[0]
        if exact := [number for number in alike('begins') if number in left]:
            return exact[0]
        if left:
            known = self._all[left[0]]
            raise Refusal(
                'it cannot be told whether the Trainer with out='
                f'{about["out"]} is the one whose snapshots are in '
                f'{known["folder"]} (out={known["out"]}): give each Trainer '
                'an out of its own, and the same one at each start; or '
                'another directory')
        return None

    def _write(self) -> None:
        os.makedirs(self._directory, exist_ok=True)
        with written_whole(self._path) as file:
            json.dump(self._all, file, indent=1)


def _place() -> str:
    """The lines of the script that are being run, without their numbers."""
    found, frame = [], sys._getframe()
    while frame is not None and frame.f_back is not None:
        name = frame.f_globals.get('__name__', '')
        if name == 'chainer_fp8pipe.compat' or name.startswith('runpy'):
            break
        if name.partition('.')[0] not in ('chainer', 'chainermn',
                                          'chainer_fp8pipe'):
            found.append(linecache.getline(
                frame.f_code.co_filename, frame.f_lineno).strip())
        frame = frame.f_back
    return ' < '.join(found)


def _content_of(trainer: Any) -> str:
    """A digest of what a Trainer begins with: parameters and data."""
    found = hashlib.blake2b(digest_size=16)

    def add(value: Any, depth: int) -> None:
        found.update(type(value).__name__.encode())
        if isinstance(value, chainer.get_array_types()):
            if value.dtype != object:
                found.update(digest_of(chainer.backends.cuda.to_cpu(
                    value[:_ITEMS] if value.shape else value)).encode())
        elif isinstance(value, (bool, int, float, str, bytes)):
            found.update(repr(value).encode())
        elif depth:
            for part in [*(value.items() if isinstance(value, dict) else value
                           if isinstance(value, (list, tuple)) else
                           getattr(value, '__dict__', {}).items())][:_ITEMS]:
                add(part, depth - 1)
    for optimizer in trainer.updater.get_all_optimizers().values():
        for place, one in optimizer.target.namedparams():
            add((place, one.array if one.is_initialized else None), _DEPTH)
    for iterator in getattr(trainer.updater, '_iterators', {}).values():
        add(getattr(iterator, 'dataset', None), _DEPTH)
    return found.hexdigest()


@contextlib.contextmanager
def _telling_the_launcher(updater: Any) -> Iterator[None]:
    """A block in which the launcher is told of an updater's updates."""
    line, calls = LauncherLine(), AroundCalls()

    @contextlib.contextmanager
    def told() -> Iterator[None]:
        yield
        line.say(updater.iteration)
    calls.add(updater, 'update', told)
    try:
        yield
    finally:
        calls.remove()
