"""Runs of all kinds are recorded on all ranks, and nothing waits."""
import contextlib
import gc
import os
import warnings
from unittest import mock

from chainer_fp8pipe import RunReport, create_communicator
from chainer_fp8pipe.report.record import (
    PHASES,
    RecordWriter,
    read_record,
)
from chainer_fp8pipe.report.stream import EventStream
from chainer_fp8pipe.training.extensions import (
    PipelineTimeline,
    Snapshot,
    resume,
)

import chainer
import chainer.links as L
import chainermn
import numpy
import pytest
from chainer.training.updaters import StandardUpdater

from tests.ranks import on_ranks

from .trainers import REPLICAS, Job


class Recorded:
    """A training of replicas, 3 updates an epoch, with a RunReport.

    ``on`` says on which ranks.
    """

    def __init__(self, comm, out, updates=12, name='fp8', on=None,
                 filename=None, network='Normalised', **options):
        if name == 'fp8':
            options = {'warmup': 3, **options}
        self.comm, self.out = comm, str(out)
        self.communicator = create_communicator(name, comm, **options)
        self.job = Job(comm, network, REPLICAS,
                       communicator=self.communicator)
        self.trainer = self.job.trainer(out, updates)
        if on is None or comm.rank in on:
            self.trainer.extend(RunReport(self.communicator, filename))

    def run(self):
        """The record, on all ranks."""
        self.trainer.run(show_loop_exception_msg=False)
        self.comm.Barrier()
        self.close()
        return read_record(self.out)

    def close(self):
        with contextlib.suppress(AttributeError):       # ChainerMN's
            self.communicator.finalize()


@on_ranks(2, 4)
@pytest.mark.parametrize(('name', 'options'), [
    ('fp8', {'overlap': True}), ('int4', {}),
    ('float32', {'algorithm': 'ring'}), ('naive', {})])
def test_all_codecs_and_communicators_are_recorded(
        comm, tmp_path, name, options):
    record = Recorded(comm, tmp_path, name=name, **options).run()
    start, = record.starts
    assert start.ranks == comm.size
    assert record.hosts.keys() == {*range(comm.size)} == record.ended
    assert (record.ends[0].iteration, record.ends[0].error) == (12, '')
    assert [point.iteration for point in record.curves] == [*range(1, 13)]
    assert all('main/loss' in point.values for point in record.curves)
    intervals = record.intervals
    assert {one.rank for one in intervals} == {*range(comm.size)}
    for one in intervals:
        # The first update is like no other.
        assert (one.first, one.last) == (2, 12)
        assert {'input', 'forward', 'backward', 'exchange'} <= set(
            one.phases) <= set(PHASES)
        assert 0 < one.own[0] <= one.own[1] < sum(one.phases.values())
        if name == 'fp8':       # after the warm-up
            assert one.sent[name] < one.float32[name] / 2
    assert {5, 10} <= {update.iteration for update in record.updates}
    for update in record.updates:
        assert {event.rank for event in update.events} == {
            *range(comm.size)}
        assert {'input', 'forward', 'backward', 'exchange', 'update'} <= {
            event.name for event in update.events}


@on_ranks(2)
def test_two_models_bytes_are_added_up_by_communicator(comm, tmp_path):
    codecs = {'gen': 'int4', 'dis': 'float32'}
    made = {name: create_communicator(codec, comm)
            for name, codec in codecs.items()}
    trainer = trainer_of(tmp_path, TwoModels, made, communicators=made)
    trainer.extend(RunReport(comm, filename=None))
    trainer.run()
    comm.Barrier()
    intervals = read_record(str(tmp_path)).intervals
    for codec in codecs.values():
        # 21 parameters there and back; int4's warm-up is in float32.
        found = [sum(by[codec] for by in sums) for sums in zip(*(
            (one.sent, one.float32) for one in intervals), strict=True)]
        assert found == pytest.approx([21 * 8] * 2, 0.1)
    for one in made.values():
        one.finalize()


def test_what_a_rank_waits_for_is_not_its_own_work(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.updater.events = stream = EventStream()
    update = trainer.updater.update_core

    def waiting():
        stream.seconds['receive'] += 1000
        update()
    trainer.updater.update_core = waiting
    trainer.extend(RunReport(filename=None))
    trainer.run()
    one, = read_record(str(tmp_path)).intervals
    assert one.phases['receive'] == 1000
    assert one.own[1] < 100


@on_ranks(2, 4)
def test_a_pipeline_is_recorded(comm, tmp_path):
    job = Job(comm, 'Plain', batch=4, micro_batches=2)
    trainer = job.trainer(tmp_path, 12)
    trainer.extend(RunReport(comm, filename=None))
    trainer.extend(PipelineTimeline(job.updater, iteration=3))
    trainer.run()
    comm.Barrier()
    record = read_record(str(tmp_path))
    assert record.stages == {rank: rank for rank in range(comm.size)}
    assert record.starts[0].settings['schedule'] == '1f1b'
    assert (tmp_path / 'timeline.json').exists()
    assert len(record.curves) == 12
    # Of all boundaries, there and back, two micro-batches of 2 samples.
    assert sum(one.float32['to stages'] for one in record.intervals
               ) >= 2 * 2 * 2 * (comm.size - 1)
    for update in record.updates:
        for rank in range(comm.size):
            assert {event.micro_batch for event in update.events
                    if event.rank == rank and event.name == 'forward'} == {
                        0, 1}


@on_ranks(2)
def test_training_has_the_same_bits_and_hooks_are_gone_afterwards(
        comm, tmp_path):
    # A pipeline of an earlier test patches Chainer as long as it lives.
    gc.collect()
    found = []
    update, backward = StandardUpdater.update, chainer.Variable.backward
    for on in (), (0, 1):
        for overlap in False, True:
            one = Recorded(comm, tmp_path / str(on), on=on, overlap=overlap)
            one.trainer.run()
            one.close()
            found.append({name: value.tobytes() for name, value
                          in one.job.values().items()})
            assert not one.job.model.local_link_hooks
            assert not one.job.optimizer._hookable._pre_update_hooks
            assert not one.communicator.events._keeping
    assert all(bits == found[0] for bits in found)
    assert StandardUpdater.update is update
    assert chainer.Variable.backward is backward


@on_ranks(2)
@pytest.mark.parametrize('on', [(0,), (1,)])
def test_a_rank_without_it_makes_nobody_wait(comm, tmp_path, on):
    one = Recorded(comm, tmp_path, on=on)
    one.trainer.run()
    comm.Barrier()
    one.close()
    if on == (1,):
        with pytest.raises(ValueError, match='has no record'):
            read_record(str(tmp_path))
        return
    record = read_record(str(tmp_path))
    assert 'Rank 1 left no record here' in record.remarks[0]
    assert {one.rank for one in record.intervals} == {0}


@on_ranks(2)
def test_what_ended_a_run_is_recorded(comm, tmp_path):
    one = Recorded(comm, tmp_path)

    def fail(trainer):
        raise KeyError('of the test')
    one.trainer.extend(fail, name='fail', trigger=(7, 'iteration'))
    with pytest.raises(KeyError):
        one.run()
    comm.Barrier()
    one.close()
    end = read_record(str(tmp_path)).ends[0]
    assert (end.iteration, end.error) == (7, "KeyError: 'of the test'")


@on_ranks(2)
def test_a_run_that_goes_on_appends_to_its_record(comm, tmp_path):
    for updates, on in ((6, ()), (12, (0, 1)), (18, (0, 1))):
        one = Recorded(comm, tmp_path, updates, on=on)
        one.trainer.extend(Snapshot(one.communicator), trigger=(
            6, 'iteration'))
        if on:
            resume(one.trainer, one.communicator, str(tmp_path))
        one.trainer.run()
        comm.Barrier()
        one.close()
    record = read_record(str(tmp_path))
    # The first snapshot knows nothing of the extension.
    assert [start.iteration for start in record.starts] == [6, 12]
    assert [point.iteration for point in record.curves] == [*range(7, 19)]
    assert record.intervals


@on_ranks(2)
@pytest.mark.parametrize('method', ['__init__', 'write'])
def test_a_record_that_cannot_be_written_does_not_end_the_training(
        comm, tmp_path, method):
    one = Recorded(comm, tmp_path)
    with warnings.catch_warnings(record=True) as found, mock.patch.object(
            RecordWriter, method, side_effect=OSError('No space left')):
        warnings.simplefilter('always')
        one.trainer.run()
    one.close()
    assert one.trainer.updater.iteration == 12
    said = [str(warning.message) for warning in found
            if 'the training goes on' in str(warning.message)]
    assert len(said) == 1
    assert f'on rank {comm.rank}' in said[0]


# --- one process -------------------------------------------------------------

def trainer_of(out, updater=StandardUpdater, names=('main',), updates=8,
               communicators=None):
    """Of plain Chainer, or of ChainerMN with communicators by name."""
    data = [(numpy.ones(6, 'f'), numpy.int32(n % 3)) for n in range(20)]
    optimizers = {name: chainer.optimizers.SGD() for name in names}
    for name, one in (communicators or {}).items():
        optimizers[name] = chainermn.create_multi_node_optimizer(
            optimizers[name], one)
    for one in optimizers.values():
        one.setup(L.Classifier(L.Linear(6, 3)))
    return chainer.training.Trainer(updater(
        chainer.iterators.SerialIterator(data, 5), optimizers),
        (updates, 'iteration'), str(out))


class TwoModels(StandardUpdater):
    """Trains two models, one after the other, as those of a GAN are."""

    def update_core(self):
        batch = self.converter(self.get_iterator('main').next(), -1)
        for optimizer in self.get_all_optimizers().values():
            loss = optimizer.target(*batch)
            optimizer.target.cleargrads()
            loss.backward()
            optimizer.update()


@pytest.mark.parametrize(('updater', 'models', 'expected'), [
    (StandardUpdater, ('main',), ['update', 'forward', 'backward']),
    (TwoModels, ('main', 'other'), ['forward', 'backward', 'update'] * 2)])
def test_a_training_of_chainer_alone_is_recorded(
        tmp_path, updater, models, expected):
    trainer = trainer_of(tmp_path, updater, models)
    trainer.extend(RunReport(filename=None))
    trainer.run()
    record = read_record(str(tmp_path))
    regular, = (one for one in record.updates if one.iteration == 5)
    assert [event.name for event in sorted(
            regular.events, key=lambda event: event.start)] == [
        'input', *expected]
    assert not record.intervals[0].sent
    assert record.starts[0].settings['optimizer'] == 'SGD'


@pytest.mark.parametrize('value', [
    'abc', b'abc', numpy.array('abc'), numpy.array(None), None, 10 ** 400,
    numpy.zeros(3), [1, 2], object(), numpy.float16('nan')])
def test_reports_that_are_no_numbers_are_left_out(tmp_path, value):
    trainer = trainer_of(tmp_path)
    trainer.extend(RunReport(filename=None))
    trainer.extend(lambda trainer: trainer.observation.update(odd=value),
                   name='odd', trigger=(1, 'iteration'),
                   priority=chainer.training.PRIORITY_EDITOR)
    trainer.run()
    points = read_record(str(tmp_path)).curves
    assert len(points) == 8
    assert all('main/loss' in point.values for point in points)


def test_the_verdict_and_the_page_are_those_of_the_end(tmp_path, capsys):
    trainer = trainer_of(tmp_path)
    trainer.extend(RunReport(filename='page.html'))
    try:
        raise KeyError('of another place')
    except KeyError:
        trainer.run()
    assert read_record(str(tmp_path)).ends[0].error == ''
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f'page: {tmp_path / "page.html"}'
    assert any('8 updates' in line for line in lines)
    assert '1 start: nothing died.' in (tmp_path / 'page.html').read_text()


def test_an_extension_that_fails_to_begin_leaves_nothing_patched(tmp_path):
    backward, trainer = chainer.Variable.backward, trainer_of(tmp_path)

    def begin(trainer):
        raise OSError('of another extension')
    trainer.extend(chainer.training.make_extension(
        initializer=begin)(lambda trainer: None), name='other',
        priority=-1000)
    trainer.extend(RunReport(filename=None))
    with pytest.raises(OSError, match='another'):
        trainer.run()
    assert chainer.Variable.backward is backward


def test_two_reports_and_what_is_no_communicator_are_refused(tmp_path):
    with pytest.raises(TypeError, match='must be a communicator'):
        RunReport(7)
    trainer = trainer_of(tmp_path)
    trainer.extend(RunReport())
    trainer.extend(RunReport(filename=None), name='second')
    with pytest.raises(ValueError, match='RunReport twice'):
        trainer.run()


def test_somebody_elses_file_ends_the_training_before_it_begins(tmp_path):
    os.mkdir(tmp_path / 'report')
    (tmp_path / 'report' / 'rank0.jsonl').write_text('mine\n')
    trainer = trainer_of(tmp_path)
    trainer.extend(RunReport())
    with pytest.raises(ValueError, match='move it away'):
        trainer.run()
    assert trainer.updater.iteration == 0


def test_points_of_a_long_training_become_means(tmp_path):
    trainer = trainer_of(tmp_path, updates=1300)
    trainer.extend(RunReport(filename=None))
    trainer.run()
    places = [point.iteration for point in read_record(str(tmp_path)).curves]
    assert places == [*range(1, 500), *range(501, 1000, 2),
                      *range(1002, 1301, 3), 1300]
