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

from .helpers import make_trainer, names, weights


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


# What fails on one rank alone: where, and whether all raise ('all'), or
# training goes on and says that the snapshot was not written ('none').
SAVING = {
    'an extension does not save': (
        None, Own, 'serialize', lambda self, serializer: {}['x'], 'all'),
    'a state cannot be collected': (
        None, states, '_random', fails, 'all'),
    'a value cannot be saved': (
        None, Own, 'serialize',
        lambda self, serializer: serializer('x', print), 'all'),
    'a digest cannot be computed': (
        None, snapshot_file, 'digest_of', fails, 'all'),
    'there is no thread for digests': (
        None, gather._Thread, 'start', no_digests, 'written'),
    'there is no thread that writes': (
        0, gather._Thread, 'start', no_writer, 'all'),
    'the folder cannot be made': (0, os, 'makedirs', fails, 'all'),
    'a member cannot be written': (
        0, snapshot_file, '_write_member', fails, 'all'),
    'the disk is full at the end': (0, os, 'fsync', fails, 'all'),
    'the name cannot be given': (0, os, 'replace', fails, 'all'),
}


@pytest.mark.parametrize('what', SAVING)
@on_ranks(3)
def test_a_failure_of_one_rank_in_saving_is_one_of_all(comm, what, tmp_path):
    only, place, name, failure, outcome = SAVING[what]
    for rank in (range(comm.size) if only is None else [only])[-2:]:
        out = tmp_path / str(rank)
        trainer, communicator = make(comm, out, 6)
        patch = mock.patch.object(place, name, failure)

        def begin(trainer, rank=rank, patch=patch):
            trainer.get_extension('Snapshot')._complete()
            if comm.rank == rank:
                patch.__enter__()
        trainer.extend(begin, name='begin', trigger=(
            training.triggers.ManualScheduleTrigger(4, 'iteration')),
            priority=-200)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            try:
                with (contextlib.nullcontext() if outcome == 'written' else
                      pytest.raises(RuntimeError, match=f'rank {rank}: ')):
                    trainer.run()
            finally:
                if comm.rank == rank:
                    patch.__exit__(None, None, None)
        comm.Barrier()
        found = names(out)
        assert found == ['snapshot_iter_3.npz', 'snapshot_iter_6.npz'][
            :2 if outcome == 'written' else 1]
        assert not list(out.glob('*partial*'))
        trainer, communicator = make(comm, out, 6)
        assert resume(trainer, communicator, str(out)) == 3 * len(found)


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
    'the file is missing': (
        0, module, '_whole', fails),
    'an extension does not load': (
        None, Own, 'serialize', lambda self, serializer: {}['x']),
    'a state cannot be collected': (
        None, module, 'collect', fails),
    'a value cannot be read': (
        0, snapshot_file.Content, 'read', fails),
    'a value is damaged on its way': (
        None, snapshot_file, 'digest_of', lambda value: None),
    'there is no memory for what was': (
        None, module, 'undoing', fails),
    'it does not fit': (
        None, module, 'incompatible', fails),
    'an optimizer cannot be restored': (
        None, states, 'restore_optimizers', fails),
    'random numbers cannot be restored': (
        None, states, '_restore_random', mock.Mock(side_effect=[
            ValueError, *[None] * 9])),
    'a warning is an error': (
        None, module, 'lost_rules', lambda *_: 'lost'),
}


@pytest.mark.parametrize('what', READING)
@on_ranks(3)
def test_a_failure_of_one_rank_in_reading_is_one_of_all(comm, what, tmp_path):
    """And all trainers are as they were, on the other ranks, too."""
    only, place, name, failure = READING[what]
    make(comm, tmp_path, 3)[0].run()
    comm.Barrier()
    for rank in (range(comm.size) if only is None else [only])[-2:]:
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
