"""Runs of all kinds are recorded on all ranks, and nothing hangs."""
import gc
import time
import warnings
from unittest import mock

from chainer_fp8pipe import RunReport, create_communicator
from chainer_fp8pipe.report.diagnosis import SLOW_RANK, diagnose
from chainer_fp8pipe.report.events import explain_waits
from chainer_fp8pipe.report.record import (
    PHASES,
    RECORD,
    RecordWriter,
    read_record,
)
from chainer_fp8pipe.training.extensions import (
    PipelineTimeline,
    Snapshot,
    resume,
)

import chainer
import chainer.links as L
import numpy
import pytest
from chainer.training import Trainer, extensions
from chainer.training.updaters import StandardUpdater

from tests.ranks import on_ranks
from tests.training.updaters.networks import Plain, dataset
from tests.training.updaters.test_pipeline_updater import make_updater

from ..extensions.helpers import Net, make_trainer, weights
from ..extensions.made_up import plan_for


def recorded(comm, tmp_path, *args, **options):
    """The record of a small run of 20 updates, on all ranks."""
    trainer, communicator = make_trainer(comm, tmp_path, *args, **options)
    trainer.extend(RunReport(communicator, filename=None))
    # So that there are several intervals.
    with mock.patch('chainer_fp8pipe.training.run_reports.run_report.'
                    'SHORTEST', 0.0):
        trainer.run()
    comm.Barrier()
    if hasattr(communicator, 'finalize'):
        communicator.finalize()
    return read_record(str(tmp_path))


@on_ranks(1, 4)
@pytest.mark.parametrize(('name', 'options'), [
    ('fp8', {'overlap': True}), ('fp8', {'overlap': 'next_forward'}),
    ('int4', {}), ('float32', {'algorithm': 'ring'}), ('naive', {})])
def test_all_codecs_and_communicators_are_recorded(
        comm, tmp_path, name, options):
    record = recorded(comm, tmp_path, name=name, **options)
    start, = record.starts
    assert (start.ranks, start.reporting) == (
        comm.size, tuple(range(comm.size)))
    assert record.ends[0][2:] == (20, '')
    assert [point.iteration for point in record.curves] == [*range(1, 21)]
    assert all('main/loss' in point.values for point in record.curves)
    assert all(one.peak >= one.resident > 1e6 for one in record.intervals)
    for rank in range(comm.size):
        mine = [one for one in record.intervals if one.rank == rank]
        assert mine[0].first == 1
        assert mine[-1].last == 20
        assert [one.first - 1 for one in mine[1:]] == [
            one.last for one in mine[:-1]]
        for one in mine:
            assert set(one.phases) <= set(PHASES)
            assert {'input', 'forward', 'backward', 'exchange'} <= set(
                one.phases)
            if one.updates == 1:
                assert one.seconds == pytest.approx(one.step[1], rel=0.05)
    for update in record.updates:
        assert {event.rank for event in update.events} == {
            *range(comm.size)}
        names = {event.name for event in update.events}
        assert {'input', 'forward', 'backward', 'exchange', 'update'
                } <= names
    assert record.updates
    assert record.updates[0].iteration > 1


@on_ranks(2)
def test_bytes_are_those_that_the_codec_sends(comm, tmp_path):
    record = recorded(comm, tmp_path, width=64)
    elements = sum(one.elements for one in record.tensors
                   if one.iteration == 20)
    codecs = []
    for one in record.intervals:
        (level, (codec, sent, whole)), = one.sent.items()
        assert (level, whole) == ('inside nodes', 4 * elements)
        codecs.append(codec)
        if codec == 'fp8':      # not mixed with the warm-up's float32
            assert sent == pytest.approx(elements, rel=0.1)
    assert codecs[-2:] == ['fp8', 'fp8']
    assert {*codecs} <= {'fp8', 'float32', 'float32, then fp8'}


@on_ranks(4)
@pytest.mark.parametrize(('name', 'options'), [
    ('float32', {'shared_memory': False}), ('fp8_paper', {})])
def test_bytes_are_told_apart_by_level(comm, tmp_path, name, options):
    record = recorded(comm, tmp_path, name=name, ranks_per_node=2, width=64,
                      **options)
    levels = {level: sum(one.sent[level][1] for one in record.intervals
                         if one.last == 20)
              for level in ('inside nodes', 'between nodes')}
    # Half of a node's vector comes to each rank in it, which exchanges it
    # with one rank of the other node: 1/2 and 1/2, 1/4 and 1/4 of the vector.
    assert levels['inside nodes'] == pytest.approx(
        2 * levels['between nodes'], rel=0.01)


@on_ranks(2)
def test_the_health_of_each_tensor_is_recorded(comm, tmp_path):
    record = recorded(comm, tmp_path, headroom=1.0)
    assert {one.name for one in record.tensors} == {
        f'/predictor/{name}' for name in (
            'l1/W', 'l1/b', 'bn/gamma', 'bn/beta', 'l2/W', 'l2/b')}
    last = [one for one in record.tensors if one.iteration == 20]
    for one in last:
        assert one.values['q'] > 0
        assert one.values['gradient'] > 0
        assert one.values['residual'] > 0
        assert 0 <= one.values['clipped'] <= 1
    assert any(one.values['clipped'] > 0 for one in last)


@on_ranks(2, 4)
def test_a_pipeline_is_recorded(comm, tmp_path):
    updater = make_updater(comm, Plain, dataset(12), batch=4,
                           micro_batches=2)
    trainer = Trainer(updater, (4, 'epoch'), str(tmp_path))
    trainer.extend(RunReport(comm, filename=None))
    trainer.extend(PipelineTimeline(updater, iteration=3))
    trainer.run()
    comm.Barrier()
    record = read_record(str(tmp_path))
    assert record.starts[0].stages == tuple(range(comm.size))
    assert record.starts[0].options['schedule'] == '1f1b'
    assert (tmp_path / 'timeline.json').exists()
    assert len(record.curves) == 12
    assert {level for one in record.intervals for level in one.sent} == {
        'pipeline'}
    # Of all boundaries, there and back, two micro-batches of 2 samples.
    assert sum(one.sent['pipeline'][2] for one in record.intervals
               if one.last == 12) >= 2 * 2 * 2 * (comm.size - 1)
    for update in record.updates:
        by_rank = {rank: [event for event in update.events
                          if event.rank == rank]
                   for rank in range(comm.size)}
        assert [event.name for event in by_rank[0]][0] == 'input'
        for events in by_rank.values():
            assert {event.micro_batch for event in events
                    if event.name == 'forward'} == {0, 1}
        for wait in explain_waits(update.events):
            if wait.name == 'wait':
                assert wait.about.startswith('rank ')


@on_ranks(2)
def test_a_trainer_without_ranks_is_recorded_alone(comm, tmp_path):
    """On each rank by itself, in Chainer's own optimizer."""
    numpy.random.seed(0)
    model = L.Classifier(Net())
    data = chainer.datasets.TupleDataset(
        numpy.random.rand(20, 6).astype('f'), numpy.zeros(20, 'i'))
    out = str(tmp_path / str(comm.rank))
    trainer = Trainer(StandardUpdater(
        chainer.iterators.SerialIterator(data, 5),
        chainer.optimizers.Adam().setup(model)), (2, 'epoch'), out)
    trainer.extend(RunReport(comm.Split(comm.rank, 0), filename=None))
    trainer.run()
    record = read_record(out)
    assert {'input', 'forward', 'backward', 'update'} <= set(
        record.intervals[0].phases)
    assert 'exchange' not in record.intervals[0].phases
    assert not record.intervals[0].sent
    names = [event.name for event in record.updates[0].events]
    assert names == ['input', 'forward', 'backward', 'update']


@on_ranks(2)
def test_training_has_the_same_bits_and_hooks_are_gone_afterwards(
        comm, tmp_path):
    # A pipeline of an earlier test patches Chainer as long as it lives.
    gc.collect()
    found = []
    update = chainer.training.updaters.StandardUpdater.update
    backward = chainer.Variable.backward
    for is_recorded in False, True:
        for overlap in False, 'next_forward':
            trainer, communicator = make_trainer(
                comm, tmp_path / str(is_recorded), overlap=overlap)
            if is_recorded:
                trainer.extend(RunReport(communicator, filename=None))
            trainer.run()
            found.append(weights(trainer))
            optimizer = trainer.updater.get_optimizer('main')
            assert not optimizer.target.local_link_hooks
            assert not optimizer._hookable._pre_update_hooks
            assert not communicator.events._keeping
            communicator.finalize()
    assert all(bits == found[0] for bits in found)
    assert StandardUpdater.update is update
    assert chainer.Variable.backward is backward


# --- which ranks have it -----------------------------------------------------

@on_ranks(2)
def test_rank_0_alone_records_its_own_and_says_so(comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path)
    if comm.rank == 0:
        trainer.extend(RunReport(communicator, filename=None))
    with warnings.catch_warnings(record=True) as found, mock.patch(
            'chainer_fp8pipe.mpi.agreement.PATIENCE', 0.5):
        warnings.simplefilter('always')
        trainer.run()
    comm.Barrier()
    communicator.finalize()
    said = [str(one.message) for one in found if 'RunReport' in
            str(one.message)]
    assert len(said) == (comm.rank == 0)
    assert all('on all ranks' in text for text in said)
    record = read_record(str(tmp_path))
    assert record.starts[0].ranks == comm.size
    assert record.starts[0].reporting == (0,)
    assert {one.rank for one in record.intervals} == {0}
    assert record.updates


@on_ranks(2)
def test_without_rank_0_it_is_an_error(comm, tmp_path):
    comm = comm.Dup()       # on which a message stays that nobody reads
    trainer, communicator = make_trainer(comm, tmp_path)
    if comm.rank:
        trainer.extend(RunReport(communicator, filename=None))
    with mock.patch('chainer_fp8pipe.mpi.agreement.IN_VAIN', 0.5):
        report = comm.rank and trainer.get_extension('RunReport')
        trainer.updater.update()        # connects, on both ranks
        if report:
            report.initialize(trainer)
        trainer.updater.update()
        if report:
            with pytest.raises(RuntimeError, match='give it to all ranks'):
                report(trainer)
            report.finalize()
    comm.Barrier()
    communicator.finalize()


def test_what_is_no_communicator_is_an_error():
    with pytest.raises(TypeError, match='needs a communicator'):
        RunReport(7)


@on_ranks(2)
def test_a_folder_with_something_else_in_it_is_the_same_error_on_all_ranks(
        comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path)
    trainer.extend(RunReport(communicator, filename=None))
    if comm.rank == 0:
        (tmp_path / RECORD).write_text('mine\n')
    comm.Barrier()
    with pytest.raises(ValueError, match='rank 0: .*not a record of a run'):
        trainer.run(show_loop_exception_msg=False)
    communicator.finalize()


# --- a plan ------------------------------------------------------------------

@on_ranks(2)
@pytest.mark.parametrize(('plan', 'problem'), [
    (2, ''), (3, 'the plan is for 3 ranks'), ('absent.json', 'absent.json')])
def test_a_plan_stands_in_the_record_or_is_an_error_on_all_ranks(
        comm, tmp_path, plan, problem):
    trainer, communicator = make_trainer(comm, tmp_path, name='float32')
    parts = {'forward and backward': 0.25, 'exchange': 0.5}
    trainer.extend(RunReport(communicator, filename=None, plan=plan_for(
        plan, parts) if isinstance(plan, int) else plan))
    if problem:
        with pytest.raises(ValueError, match=problem):
            trainer.run(show_loop_exception_msg=False)
    else:
        trainer.run()
        comm.Barrier()
        start, = read_record(str(tmp_path)).starts
        assert (start.planned, start.spread) == (parts, 0.1)
        assert start.plan
    communicator.finalize()


# --- runs that end early, and go on ------------------------------------------

@on_ranks(2)
def test_what_ended_a_run_is_recorded(comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path)
    trainer.extend(RunReport(communicator, filename=None))

    def fail(trainer):
        raise KeyError('of the test')
    trainer.extend(fail, name='fail', trigger=(7, 'iteration'))
    with pytest.raises(KeyError):
        trainer.run(show_loop_exception_msg=False)
    comm.Barrier()
    communicator.finalize()
    end, = read_record(str(tmp_path)).ends
    assert end.iteration == 7
    assert end.error == "KeyError: 'of the test'"


@on_ranks(2)
def test_a_run_that_goes_on_appends_to_its_record(comm, tmp_path):
    for epochs, is_recorded in ((2, False), (4, True), (6, True)):
        trainer, communicator = make_trainer(comm, tmp_path, epochs)
        trainer.extend(Snapshot(communicator))
        if is_recorded:
            trainer.extend(RunReport(communicator, filename=None))
        if is_recorded:
            resume(trainer, communicator, str(tmp_path))
        trainer.run()
        comm.Barrier()
        communicator.finalize()
    record = read_record(str(tmp_path))
    # The first snapshot knows nothing of the extension.
    assert [start.iteration for start in record.starts] == [10, 20]
    assert [point.iteration for point in record.curves] == [*range(11, 31)]
    assert {one.start for one in record.intervals} == {0, 1}


@on_ranks(2)
@pytest.mark.parametrize('method', ['__init__', 'write'])
def test_a_record_that_cannot_be_written_does_not_end_the_training(
        comm, tmp_path, method):
    trainer, communicator = make_trainer(comm, tmp_path)
    trainer.extend(RunReport(communicator, filename=None))
    with warnings.catch_warnings(record=True) as found, mock.patch.object(
            RecordWriter, method, side_effect=OSError('No space left')):
        warnings.simplefilter('always')
        trainer.run()
    communicator.finalize()
    assert trainer.updater.iteration == 20
    said = [str(one.message) for one in found
            if 'the training goes on' in str(one.message)]
    assert len(said) == (comm.rank == 0)


# --- the page, and what it says ----------------------------------------------

@on_ranks(2)
def test_the_page_is_written_at_ends_of_epochs_and_at_the_end(
        comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path)
    trainer.extend(extensions.Evaluator(
        chainer.iterators.SerialIterator(
            trainer.updater.get_iterator('main').dataset, 8, repeat=False,
            shuffle=False), trainer.updater.get_optimizer('main').target))
    trainer.extend(RunReport(communicator, filename='page.html'))
    seen = []

    def note(records, path):
        record, = records
        seen.append((path, record.curves[-1].iteration,
                     'validation/main/loss' in record.curves[-1].values,
                     len(record.ends)))
    where = 'chainer_fp8pipe.training.run_reports'
    with mock.patch('chainer_fp8pipe.report.page.write_page', note), (
            mock.patch(f'{where}.run_report.SHORTEST', 0.0)), (
            mock.patch(f'{where}.recorder._PAGES', 0.0)):
        trainer.run()
    communicator.finalize()
    path = str(tmp_path / 'page.html')
    assert seen == ([] if comm.rank else [
        (path, 5, True, 0), (path, 10, True, 0), (path, 15, True, 0),
        (path, 20, True, 1)])


@on_ranks(4)
def test_a_rank_that_sleeps_is_named(comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path, 6)
    model = trainer.updater.get_optimizer('main').target
    forward, last = model.predictor.forward, comm.size - 1

    def slow(x):
        if comm.rank == last and chainer.config.train:
            time.sleep(0.3)
        return forward(x)
    model.predictor.forward = slow
    trainer.extend(RunReport(communicator, filename=None))
    trainer.run()
    comm.Barrier()
    communicator.finalize()
    record = read_record(str(tmp_path))
    found = [finding for finding in diagnose(record)
             if finding.kind == SLOW_RANK]
    assert (last,) in [finding.ranks for finding in found]
    assert 'forward' in max(found, key=lambda one: one.figure).text
    causes = [wait.about for update in record.updates
              for wait in explain_waits(update.events)
              if wait.name == 'wait' and wait.end - wait.start > 0.2]
    assert causes
    assert set(causes) == {f'rank {last}: forward'}


@on_ranks(1)
def test_the_communicator_that_nobody_names_is_the_worlds(comm, tmp_path):
    communicator = create_communicator('float32')
    assert RunReport()._ranks.size == communicator.size
