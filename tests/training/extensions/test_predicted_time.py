"""Steps by a clock of the tests' own, beside a made-up prediction."""
import json
import warnings

from chainer_fp8pipe.training.extensions import PredictedTime

import chainer
import pytest
from chainer.training import Trainer, extensions
from chainer.training.updaters import StandardUpdater

from tests.ranks import on_ranks
from tests.training.updaters.networks import Plain, dataset
from tests.training.updaters.test_pipeline_updater import make_updater

from .helpers import make_trainer
from .made_up import Clock, plan_for

#: Seconds that no real wait comes near.
STEP = 1e6


class Watch:
    """A training whose forward passes take as long as a test says.

    ``seconds`` gives those of the update of a number, counted from 1.
    """

    def __init__(self, trainer, seconds):
        self.trainer, self.seen, self.clock = trainer, [], Clock()
        model = trainer.updater.get_optimizer('main').target
        forward = model.predictor.forward

        def slow(x):
            if chainer.config.train:
                self.clock.passes(seconds(trainer.updater.iteration + 1))
            return forward(x)
        model.predictor.forward = slow

    def run(self, plan, comm, **options):
        """The warnings of this rank."""
        self.trainer.extend(PredictedTime(
            plan, comm, clock=self.clock, **options))
        self.trainer.extend(
            lambda trainer: self.seen.append(tuple(map(
                trainer.observation.get,
                ('step_time', 'predicted_step_time')))),
            name='note', trigger=(1, 'iteration'))
        return messages(self.trainer)


def messages(trainer):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        trainer.run()
    return [str(one.message) for one in found
            if 'a step takes' in str(one.message)]


def passes(seconds):
    return {'forward and backward': seconds, 'exchange': 0.0}


@on_ranks(2)
def test_the_slowest_ranks_median_stands_beside_the_prediction(
        comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path, 4, 'float32')
    # Updates 6 to 9 are timed first, then 10 to 13, then 14 to 17.
    watch = Watch(trainer, lambda update: STEP * (comm.rank + {
        6: 1, 7: 50, 8: 2, 9: 3, 12: 0}.get(update, 4)))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport(trigger=(9, 'iteration')))
    watch.run(plan_for(2, passes(3.6 * STEP)), comm, interval=4,
              tolerance=9.0)
    predicted = 3.6 * STEP
    assert watch.seen == (
        [(None, None)] * 8 + [(3.5 * STEP, predicted)] * 4
        + [(5 * STEP, predicted)] * 8)
    if comm.rank == 0:
        log = json.loads((tmp_path / 'log').read_text())
        assert log[0]['step_time'] == 3.5 * STEP
        assert log[0]['predicted_step_time'] == predicted
    communicator.finalize()


@on_ranks(2)
def test_rank_0_says_once_what_differs(comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path, 4, 'float32')
    watch = Watch(trainer, lambda _: STEP * (1 + 9 * comm.rank))
    said = watch.run(
        plan_for(2, passes(2 * STEP), codec='fp8'), comm, interval=3)
    assert len(said) == (comm.rank == 0)
    for text in said:
        assert '400 % more' in text
        assert 'Of rank 1,' in text
        assert 'The largest difference is forward and backward' in text
        assert "codec='fp8' and this job has 'float32'" in text
    communicator.finalize()


@on_ranks(2)
@pytest.mark.parametrize(('seconds', 'warns'), [
    (0.79, True), (0.81, False), (1.19, False), (1.21, True)])
def test_a_difference_within_the_tolerance_is_none(
        comm, tmp_path, seconds, warns):
    trainer, communicator = make_trainer(comm, tmp_path, 2, 'float32')
    watch = Watch(trainer, lambda _: STEP * seconds)
    said = watch.run(plan_for(2, passes(STEP)), comm, interval=2)
    assert len(said) == (warns and comm.rank == 0)
    communicator.finalize()


@on_ranks(2)
def test_fp8s_first_updates_in_float32_do_not_count(comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path, 4, warmup=7)
    # The first update exchanges nothing: 2 to 8 are in float32.
    watch = Watch(trainer, lambda update: STEP * (9 if update <= 13 else 1))
    said = watch.run(plan_for(2, passes(STEP)), comm, interval=3)
    assert not said
    assert [seconds for seconds, _ in watch.seen] == (
        [None] * 14 + [STEP] * 6)
    communicator.finalize()


@on_ranks(2)
def test_with_a_longer_trigger_a_step_is_still_one_update(comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path, 4, 'float32')
    watch = Watch(trainer, lambda _: STEP)
    trainer.extend(PredictedTime(
        plan_for(2, passes(STEP)), comm, clock=watch.clock, interval=2,
        tolerance=9.0), name='other', trigger=(2, 'iteration'))
    found = []
    trainer.extend(lambda trainer: found.append(
        trainer.observation.get('step_time')), name='note',
        trigger=(2, 'iteration'))
    trainer.run()
    assert found == [None] * 6 + [STEP] * 4
    communicator.finalize()


def pipeline(comm, out, clock, seconds):
    """A pipeline whose updates are followed by so many seconds."""
    updater = make_updater(comm, Plain, dataset(12), batch=6)
    trainer = Trainer(updater, (12, 'iteration'), out)
    trainer.extend(lambda trainer: clock.passes(seconds), name='slow',
                   trigger=(1, 'iteration'))
    return trainer


@on_ranks(2)
def test_a_pipelines_steps_are_timed(comm, tmp_path):
    clock = Clock()
    trainer = pipeline(comm, tmp_path, clock, STEP * (3 - comm.rank))
    trainer.extend(PredictedTime(
        plan_for(2, passes(STEP), replicas=1, stages=2, micro_batches=3),
        comm, clock=clock, interval=4))
    said = messages(trainer)
    assert trainer.observation['step_time'] == 3 * STEP
    assert len(said) == (comm.rank == 0)
    for text in said:
        assert 'The largest difference is other' in text
        assert 'micro_batches=3 and this job has 4' in text
        assert 'codec' not in text


def refused(comm, trainer, match, plan, **options):
    trainer.extend(PredictedTime(plan, comm, **options))
    with pytest.raises(ValueError, match=match):
        trainer.run()


@on_ranks(2)
def test_a_plan_for_other_ranks_is_an_error(comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path)
    refused(comm, trainer, 'the plan is for 4 ranks, and there are 2',
            plan_for(4, passes(1.0)))
    communicator.finalize()


@on_ranks(2)
def test_another_plan_on_one_rank_is_an_error_on_all(comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path)
    refused(comm, trainer, 'predicted time is 1.0 on rank 0 but 2.0 on rank '
            '1', plan_for(2, passes(1.0 + comm.rank)))
    communicator.finalize()


@on_ranks(2)
def test_a_plan_without_a_prediction_is_an_error(comm, tmp_path):
    trainer, communicator = make_trainer(comm, tmp_path)
    refused(comm, trainer, 'predicts no time', plan_for(2, {}))
    communicator.finalize()


@on_ranks(2)
@pytest.mark.parametrize('name', ['naive', ''])
def test_a_training_whose_exchange_is_not_seen_is_refused(
        comm, tmp_path, name):
    trainer, communicator = make_trainer(comm, tmp_path, name=name or 'fp8')
    if not name:
        updater = trainer.updater
        trainer.updater = StandardUpdater(
            updater.get_iterator('main'),
            updater.get_optimizer('main').actual_optimizer)
    refused(comm, trainer, 'needs a PipelineUpdater, or one multi-node',
            plan_for(2, passes(1.0)))
    communicator.finalize()


@pytest.mark.parametrize(('options', 'match'), [
    ({'interval': 0}, 'interval must be at least 1'),
    ({'tolerance': 0.0}, 'tolerance must be above 0')])
def test_arguments_out_of_range_are_errors(options, match):
    with pytest.raises(ValueError, match=match):
        PredictedTime(plan_for(1, passes(1.0)), **options)


def test_a_plan_is_taken_as_an_object_or_a_file(tmp_path):
    plan = plan_for(2, passes(1.0))
    plan.save(str(tmp_path / 'plan.json'))
    planned = type('Planned', (), {'plan': plan})()
    for one in plan, planned, str(tmp_path / 'plan.json'):
        assert PredictedTime(one)._plan == plan
