"""Runs of all kinds are recorded on all ranks, and nothing hangs."""
import contextlib
import gc
import io
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
from chainer_fp8pipe.training.run_reports import recorder, run_report

import chainer
import pytest
from chainer.training.updaters import StandardUpdater

from tests.ranks import on_ranks

from ..extensions.made_up import plan_for
from ..trainers import REPLICAS, SERIAL, Job

#: Rank 0 writes after each epoch, of which there are several.
often = mock.patch.object(run_report, 'SHORTEST', 0.0)


class Recorded:
    """A training of replicas, 3 updates an epoch, with a RunReport.

    ``on`` says on which ranks; as a block, it runs the training in it.
    """

    def __init__(self, comm, out, updates=12, name='fp8', on=None, plan=None,
                 filename=None, network='Normalised', **options):
        if name == 'fp8':
            options = {'warmup': 3, 'period': 4, **options}
        self.comm, self.out = comm, str(out)
        self.communicator = create_communicator(name, comm, **options)
        self.job = Job(comm, network, REPLICAS,
                       communicator=self.communicator)
        self.trainer = self.job.trainer(out, updates)
        if on is None or comm.rank in on:
            self.trainer.extend(RunReport(self.communicator, plan, filename))

    def run(self):
        """The record, on all ranks."""
        self.trainer.run(show_loop_exception_msg=False)
        self.comm.Barrier()
        self.close()
        return read_record(self.out)

    def close(self):
        with contextlib.suppress(AttributeError):       # ChainerMN's
            self.communicator.finalize()


@contextlib.contextmanager
def warned(text):
    """A block that rank 0 alone leaves with one warning of this text."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        yield lambda comm: sum(
            text in str(one.message) for one in found) == (comm.rank == 0)


@on_ranks(2, 4)
@pytest.mark.parametrize(('name', 'options'), [
    ('fp8', {'overlap': True}), ('fp8', {'overlap': 'next_forward'}),
    ('int4', {}), ('float32', {'algorithm': 'ring'}), ('naive', {})])
def test_all_codecs_and_communicators_are_recorded(
        comm, tmp_path, name, options):
    with often:
        record = Recorded(comm, tmp_path, name=name, **options).run()
    start, = record.starts
    assert (start.ranks, start.reporting) == (
        comm.size, tuple(range(comm.size)))
    assert record.ends[0][2:] == (12, '')
    assert [point.iteration for point in record.curves] == [*range(1, 13)]
    assert all('main/loss' in point.values for point in record.curves)
    assert all(one.peak >= one.resident > 1e6 for one in record.intervals)
    for rank in range(comm.size):
        mine = [one for one in record.intervals if one.rank == rank]
        assert mine[0].first == 1
        assert mine[-1].last == 12
        assert [one.first - 1 for one in mine[1:]] == [
            one.last for one in mine[:-1]]
        for one in mine:
            assert {'input', 'forward', 'backward', 'exchange'} <= set(
                one.phases) <= set(PHASES)
            if one.updates == 1:
                assert one.seconds == pytest.approx(one.step[1], rel=0.05)
    assert record.updates[0].iteration > 1
    for update in record.updates:
        assert {event.rank for event in update.events} == {
            *range(comm.size)}
        assert {'input', 'forward', 'backward', 'exchange', 'update'} <= {
            event.name for event in update.events}


@on_ranks(2)
def test_bytes_and_health_are_those_of_the_codec(comm, tmp_path):
    with often:
        record = Recorded(comm, tmp_path, 15).run()
    last = [one for one in record.tensors if one.iteration == 15]
    names = {f'/{name}' for name in (
        '1/W', '2/gamma', '2/beta', '4/W', '5/gamma', '5/beta', '6/W', '6/b')}
    assert {one.name for one in last} == names
    for one in last:
        assert min(one.values[key] for key in (
            'q', 'gradient', 'residual')) > 0
        assert 0 <= one.values['clipped'] <= 1
    elements = sum(one.elements for one in last)
    codecs = []
    for one in record.intervals:
        (level, (codec, sent, whole)), = one.sent.items()
        assert (level, whole) == ('inside nodes', 4 * elements)
        codecs.append(codec)
        if codec == 'fp8':      # not mixed with the warm-up's float32
            assert elements <= sent < elements + 300
    assert codecs[-2:] == ['fp8', 'fp8']
    assert {*codecs} <= {'fp8', 'float32', 'float32, then fp8'}


@on_ranks(4)
@pytest.mark.parametrize(('name', 'options'), [
    ('float32', {'shared_memory': False}), ('fp8_paper', {})])
def test_bytes_are_told_apart_by_level(comm, tmp_path, name, options):
    record = Recorded(comm, tmp_path, name=name, ranks_per_node=2,
                      network='Plain', **options).run()
    levels = {level: sum(one.sent[level][1] for one in record.intervals
                         if one.last == 12)
              for level in ('inside nodes', 'between nodes')}
    # Half of a node's vector comes to each rank in it, which exchanges it
    # with one rank of the other node: 1/2 and 1/2, 1/4 and 1/4 of the vector.
    assert levels['inside nodes'] == pytest.approx(
        2 * levels['between nodes'], rel=0.02)


@on_ranks(2)
def test_a_stage_that_waits_for_a_batch_does_not_work(comm, tmp_path):
    job = Job(comm, 'Plain', batch=4, micro_batches=2)
    read = job.updater.get_iterator('main').next

    def late():
        time.sleep(0.3)
        return read()
    job.updater.get_iterator('main').next = late
    trainer = job.trainer(tmp_path, 4)
    trainer.extend(RunReport(comm, filename=None, prints=False))
    trainer.run()
    comm.Barrier()
    own = {one.rank: one.own[1] for one in read_record(
        str(tmp_path)).intervals}
    assert own[0] > 0.3 > own[1]


@on_ranks(2, 4)
def test_a_pipeline_is_recorded(comm, tmp_path):
    job = Job(comm, 'Plain', batch=4, micro_batches=2)
    trainer = job.trainer(tmp_path, 12)
    trainer.extend(RunReport(comm, filename=None))
    trainer.extend(PipelineTimeline(job.updater, iteration=3))
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
        assert by_rank[0][0].name == 'input'
        for events in by_rank.values():
            assert {event.micro_batch for event in events
                    if event.name == 'forward'} == {0, 1}
        for wait in explain_waits(update.events):
            if wait.name == 'wait':
                assert wait.about.startswith('rank ')


@on_ranks(2)
def test_a_trainer_without_ranks_is_recorded_alone(comm, tmp_path):
    """On each rank by itself, in Chainer's own optimizer."""
    out = str(tmp_path / str(comm.rank))
    trainer = Job(comm, 'Plain', SERIAL).trainer(out, 8)
    trainer.extend(RunReport(comm.Split(comm.rank, 0), filename=None))
    trainer.run()
    record = read_record(out)
    assert {'input', 'forward', 'backward', 'update'} <= set(
        record.intervals[0].phases)
    assert 'exchange' not in record.intervals[0].phases
    assert not record.intervals[0].sent
    assert [event.name for event in record.updates[0].events] == [
        'input', 'forward', 'backward', 'update']


@on_ranks(2)
def test_training_has_the_same_bits_and_hooks_are_gone_afterwards(
        comm, tmp_path):
    # A pipeline of an earlier test patches Chainer as long as it lives.
    gc.collect()
    found = []
    update, backward = StandardUpdater.update, chainer.Variable.backward
    for on in (), (0, 1):
        for overlap in False, 'next_forward':
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


# --- which ranks have it -----------------------------------------------------

@on_ranks(2)
def test_rank_0_alone_records_its_own_and_says_so(comm, tmp_path):
    with warned('it on all ranks') as is_said, mock.patch(
            'chainer_fp8pipe.mpi.agreement.PATIENCE', 0.5):
        record = Recorded(comm, tmp_path, on=(0,)).run()
    assert is_said(comm)
    assert record.starts[0].ranks == comm.size
    assert record.starts[0].reporting == (0,)
    assert {one.rank for one in record.intervals} == {0}
    assert record.updates


@on_ranks(2)
def test_without_rank_0_it_is_an_error(comm, tmp_path):
    # A message stays on this communicator that nobody reads.
    one = Recorded(comm.Dup(), tmp_path, on=(1,))
    with mock.patch('chainer_fp8pipe.mpi.agreement.IN_VAIN', 0.5):
        report = comm.rank and one.trainer.get_extension('RunReport')
        one.trainer.updater.update()        # connects, on both ranks
        if report:
            report.initialize(one.trainer)
        one.trainer.updater.update()
        if report:
            with pytest.raises(RuntimeError, match='give it to all ranks'):
                report(one.trainer)
            report.finalize()
    comm.Barrier()
    one.close()


@on_ranks(1)
def test_the_communicator_is_the_worlds_or_an_error(comm):
    assert RunReport()._ranks.size == comm.size
    with pytest.raises(TypeError, match='needs a communicator'):
        RunReport(7)


# --- plans, folders, ends ----------------------------------------------------

@on_ranks(2)
@pytest.mark.parametrize(('plan', 'written', 'problem'), [
    (2, '', ''), (3, '', 'the plan is for 3 ranks'),
    ('absent.json', '', 'absent.json'),
    (None, 'mine\n', 'rank 0: .*not a record of a run')])
def test_a_plan_stands_in_the_record_or_there_is_an_error_on_all_ranks(
        comm, tmp_path, plan, written, problem):
    parts = {'forward and backward': 0.25, 'exchange': 0.5}
    one = Recorded(comm, tmp_path, name='float32', plan=plan_for(
        plan, parts) if isinstance(plan, int) else plan)
    if written and comm.rank == 0:
        (tmp_path / RECORD).write_text(written)
    comm.Barrier()
    if problem:
        with pytest.raises(ValueError, match=problem):
            one.run()
        one.close()
    else:
        start, = one.run().starts
        assert (start.planned, start.spread) == (parts, 0.1)
        assert start.plan


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
    end, = read_record(str(tmp_path)).ends
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
    assert {one.start for one in record.intervals} == {0, 1}


@on_ranks(2)
@pytest.mark.parametrize('method', ['__init__', 'write'])
def test_a_record_that_cannot_be_written_does_not_end_the_training(
        comm, tmp_path, method):
    one = Recorded(comm, tmp_path)
    with warned('the training goes on') as is_said, mock.patch.object(
            RecordWriter, method, side_effect=OSError('No space left')):
        one.trainer.run()
    one.close()
    assert one.trainer.updater.iteration == 12
    assert is_said(comm)


# --- the page, and what it says ----------------------------------------------

@on_ranks(2)
def test_the_page_is_written_at_ends_of_epochs_and_at_the_end(
        comm, tmp_path):
    one = Recorded(comm, tmp_path, filename='page.html')
    one.trainer.extend(lambda trainer: chainer.report({'extra': 1.0}),
                       name='extra', trigger=(1, 'epoch'),
                       priority=chainer.training.PRIORITY_WRITER)
    seen = []

    def note(records, path):
        record, = records
        seen.append((path, record.curves[-1].iteration,
                     'extra' in record.curves[-1].values, len(record.ends)))
    with mock.patch('chainer_fp8pipe.report.page.write_page', note), often, (
            mock.patch.object(recorder, '_PAGES', 0.0)), (
            contextlib.redirect_stdout(io.StringIO())) as printed:
        one.trainer.run()
    one.close()
    path = str(tmp_path / 'page.html')
    assert seen == ([] if comm.rank else [
        (path, 3, True, 0), (path, 6, True, 0), (path, 9, True, 0),
        (path, 12, True, 1)])
    lines = printed.getvalue().splitlines()
    assert lines[-1:] == ([] if comm.rank else [f'page: {path}'])
    assert any('12 updates' in line for line in lines) == (comm.rank == 0)


@on_ranks(4)
def test_a_rank_that_sleeps_is_named(comm, tmp_path):
    one, last = Recorded(comm, tmp_path, 12, network='Plain'), comm.size - 1
    layers = one.job.model.forward

    def slow(x):
        if comm.rank == last and chainer.config.train:
            time.sleep(0.2)
        return layers(x)
    one.job.model.forward = slow
    record = one.run()
    found = [finding for finding in diagnose(record)
             if finding.kind == SLOW_RANK]
    assert (last,) in [finding.ranks for finding in found]
    assert 'forward' in max(found, key=lambda one: one.figure).text
    causes = [wait.about for update in record.updates
              for wait in explain_waits(update.events)
              if wait.name == 'wait' and wait.end - wait.start > 0.1]
    assert causes
    assert set(causes) == {f'rank {last}: forward'}
