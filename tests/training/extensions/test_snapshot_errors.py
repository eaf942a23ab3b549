"""A rank that fails alone while a snapshot is taken or read: all raise.

Nothing is lost by that: a whole snapshot that was there before is there
afterwards, and a trainer that was to go on is as it was.
"""
import contextlib
import os
import warnings
from unittest import mock

from chainer_fp8pipe.training.extensions import Snapshot, resume
from chainer_fp8pipe.training.snapshots import file as snapshot_file
from chainer_fp8pipe.training.snapshots import gather
from chainer_fp8pipe.training.snapshots import snapshot as module
from chainer_fp8pipe.training.snapshots import state as states
from chainer_fp8pipe.training.unmodified import files

import chainer
import chainer.links as L
import numpy
import pytest
from chainer import training

from tests.ranks import on_ranks

from ..trainers import make_trainer, names, weights


class Own(training.Extension):
    """An extension with a state, which may fail to save or load it."""

    name, trigger = 'own', (1, 'iteration')

    def __init__(self):
        self.calls, self.fails = 0, False

    def __call__(self, trainer):
        self.calls += 1

    def serialize(self, serializer):
        if self.fails:
            raise KeyError('on one rank')
        self.calls = serializer('calls', self.calls)


def make(comm, out, last, name='fp8', **options):
    trainer, communicator = make_trainer(comm, out, name=name)
    trainer.stop_trigger = training.get_trigger((last, 'iteration'))
    trainer.extend(Own())
    trainer.extend(Snapshot(communicator, **{'failures': 1, **options}),
                   trigger=(3, 'iteration'))
    return trainer, communicator


def fails(*_, **__):
    raise OSError(28, 'No space left on device')


def without(kind, start=gather._Thread.start):
    """A rank on which a kind of thread cannot be started."""
    def fail(self):
        if kind in self.name:
            raise RuntimeError("can't start new thread")
        start(self)
    return fail


no_digests, no_writer = without('digests'), without('writer')


#: The rank on which alone something fails, and what.
SAVING = {
    'an extension does not save': (
        2, Own, 'serialize', lambda self, serializer: {}['x']),
    'a state cannot be collected': (1, states, '_random', fails),
    'a value cannot be saved': (
        0, Own, 'serialize', lambda self, serializer: serializer('x', print)),
    'a digest cannot be computed': (2, snapshot_file, 'digest_of', fails),
    'no thread for digests': (1, gather._Thread, 'start', no_digests),
    'no thread that writes': (0, gather._Thread, 'start', no_writer),
    'the folder cannot be made': (0, os, 'makedirs', fails),
    'a member cannot be written': (0, snapshot_file, '_write_member', fails),
    'the disk is full at the end': (0, os, 'fsync', fails),
    'the name cannot be given': (0, os, 'replace', fails),
}


@pytest.mark.parametrize('what', SAVING)
@on_ranks(3)
def test_a_failure_of_one_rank_in_saving_is_one_of_all(comm, what, tmp_path):
    """But for digests without a thread, for which the training waits."""
    rank, place, name, failure = SAVING[what]
    is_written = what == 'no thread for digests'
    trainer, communicator = make(comm, tmp_path, 6)
    with contextlib.ExitStack() as stack:
        def begin(trainer):
            trainer.get_extension('Snapshot')._complete()
            if comm.rank == rank:
                stack.enter_context(mock.patch.object(place, name, failure))
        trainer.extend(begin, name='begin', priority=-200, trigger=(
            training.triggers.ManualScheduleTrigger(4, 'iteration')))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter('ignore')
        with (contextlib.nullcontext() if is_written else
              pytest.raises(RuntimeError, match=f'rank {rank}: ')):
            trainer.run()
    comm.Barrier()
    found = names(tmp_path)
    assert found == ['snapshot_iter_3.npz', 'snapshot_iter_6.npz'][
        :2 if is_written else 1]
    assert not list(tmp_path.glob('*partial*'))
    trainer, communicator = make(comm, tmp_path, 6)
    assert resume(trainer, communicator, str(tmp_path)) == 3 * len(found)


@on_ranks(2)
def test_a_warning_that_is_an_error_is_one_of_all(comm, tmp_path):
    """Not of rank 0 alone, in the middle of an update of the others."""
    trainer, _ = make(comm, tmp_path, 9, failures=None)
    with mock.patch.object(os, 'replace', fails), (
            warnings.catch_warnings()):
        warnings.filterwarnings('error', '.*could not be written')
        with pytest.raises(RuntimeError, match='rank 0: UserWarning: .*'
                           'No space left'):
            trainer.run()
    assert trainer.updater.iteration == 6


READING = {
    'the file is missing': (0, module, '_whole', fails),
    'an extension does not load': (
        2, Own, 'serialize', lambda self, serializer: {}['x']),
    'a state cannot be collected': (1, module, 'collect', fails),
    'a value cannot be read': (0, snapshot_file.Content, 'read', fails),
    'a value is damaged on its way': (
        2, snapshot_file, 'digest_of', lambda value: None),
    'there is no memory for what was': (1, module, 'undoing', fails),
    'it does not fit': (0, module, 'incompatible', fails),
    'an optimizer cannot be restored': (
        2, states, 'restore_optimizers', fails),
    'random numbers cannot be restored': (
        1, states, '_restore_random', mock.Mock(side_effect=[
            ValueError, *[None] * 9])),
    'a warning is an error': (0, module, 'lost_rules', lambda *_: 'lost'),
}


@pytest.mark.parametrize('what', READING)
@on_ranks(3)
def test_a_failure_of_one_rank_in_reading_is_one_of_all(comm, what, tmp_path):
    """And all trainers are as they were, on the other ranks, too."""
    rank, place, name, failure = READING[what]
    make(comm, tmp_path, 3)[0].run()
    comm.Barrier()
    trainer, communicator = make(comm, tmp_path, 6)
    before = everything(trainer)
    with (mock.patch.object(place, name, failure) if comm.rank == rank
          else contextlib.nullcontext()), warnings.catch_warnings():
        warnings.simplefilter('error')
        with pytest.raises((ValueError, RuntimeError)) as caught:
            resume(trainer, communicator, str(tmp_path))
    assert len(set(comm.allgather(str(caught.value)))) == 1
    assert everything(trainer) == before
    trainer, communicator = make(comm, tmp_path, 6)
    assert resume(trainer, communicator, str(tmp_path)) == 3
    assert trainer.get_extension('own').calls == 3


def everything(trainer):
    """What a resume may change, in words and bits."""
    updater = trainer.updater
    optimizer = updater.get_optimizer('main')
    actual = optimizer.actual_optimizer
    iterator = updater.get_iterator('main')
    return repr([
        weights(trainer), updater.iteration, iterator._state.order.tolist(),
        iterator.current_position, iterator.epoch, actual.t, actual.epoch,
        vars(actual.hyperparam), trainer.get_extension('own').calls,
        [(parameter.update_rule.t, parameter.update_rule._state)
         for parameter in actual.target.params()],
        numpy.random.get_state()[1].tolist(),
        trainer._snapshot_elapsed_time, sorted(trainer._extensions)])


@on_ranks(2)
def test_a_model_that_one_host_has_not_is_an_error_of_all(comm, tmp_path):
    """The rank's own error is Chainer's, which a script may expect."""
    model, path = L.Linear(2, 2), tmp_path / f'{comm.rank}.npz'
    if comm.rank == 0:
        chainer.serializers.save_npz(path, model)
    with pytest.raises(FileNotFoundError if comm.rank else ValueError,
                       match='No such file'):
        files.load_everywhere(comm, chainer.serializers.load_npz, path, model)
