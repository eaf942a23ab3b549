"""Steps by a clock of the tests' own, beside a made-up prediction."""
import warnings

from chainer_fp8pipe.training.extensions import PredictedTime

import pytest

from tests.ranks import on_ranks

from ..trainers import make_trainer
from .made_up import Clock, plan_for

#: Seconds that no real wait comes near.
STEP = 1e6


def watched(comm, out, plan, seconds, every=1, name='float32', **options):
    """What is reported after each update, and this rank's warnings.

    ``seconds`` gives those of the update of a number, counted from 1.
    """
    trainer, communicator = make_trainer(
        comm, out, 4, name, **options.pop('codec', {}))
    clock, seen = Clock(), []
    update = trainer.updater.update

    def slow():
        clock.passes(seconds(trainer.updater.iteration + 1))
        update()
    trainer.updater.update = slow
    trainer.extend(PredictedTime(plan, comm, clock=clock, **options),
                   trigger=(every, 'iteration'))
    trainer.extend(lambda trainer: seen.append(tuple(map(
        trainer.observation.get, ('step_time', 'predicted_step_time')))),
        name='note', trigger=(every, 'iteration'))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        trainer.run()
    communicator.finalize()
    return seen, [str(one.message) for one in found
                  if 'a step takes' in str(one.message)]


def plan(ranks=2, seconds=STEP):
    return plan_for(ranks, {'forward and backward': seconds})


@on_ranks(2)
def test_the_slowest_ranks_median_stands_beside_the_prediction(
        comm, tmp_path):
    # Updates 6 to 9 are timed first, then 10 to 13, then 14 to 17.
    seen, said = watched(
        comm, tmp_path, plan(seconds=3.6 * STEP),
        lambda update: STEP * (comm.rank + {
            6: 1, 7: 50, 8: 2, 9: 3, 12: 0}.get(update, 4)),
        interval=4, tolerance=9.0)
    predicted = 3.6 * STEP
    assert seen == ([(None, None)] * 8 + [(3.5 * STEP, predicted)] * 4
                    + [(5 * STEP, predicted)] * 8)
    assert not said


@on_ranks(2)
@pytest.mark.parametrize(('seconds', 'says'), [
    (0.79, '21 % less'), (0.81, ''), (1.19, ''), (1.21, '21 % more')])
def test_rank_0_says_once_that_it_differs(comm, tmp_path, seconds, says):
    _, said = watched(comm, tmp_path, plan(),
                      lambda _: STEP * seconds, interval=2)
    assert len(said) == bool(says and comm.rank == 0)
    assert all(says in text for text in said)


@on_ranks(2)
def test_fp8s_first_updates_in_float32_do_not_count(comm, tmp_path):
    # The first update exchanges nothing: 2 to 8 are in float32.
    seen, said = watched(
        comm, tmp_path, plan(), lambda update: STEP * (
            9 if update <= 13 else 1), interval=3, name='fp8',
        codec={'warmup': 7})
    assert not said
    assert [seconds for seconds, _ in seen] == [None] * 14 + [STEP] * 6


@on_ranks(2)
def test_with_a_longer_trigger_a_step_is_still_one_update(comm, tmp_path):
    seen, _ = watched(comm, tmp_path, plan(), lambda _: STEP, every=2,
                      interval=2, tolerance=9.0)
    assert [seconds for seconds, _ in seen] == [None] * 6 + [STEP] * 4


@on_ranks(2)
@pytest.mark.parametrize(('kind', 'match'), [
    ('other ranks', 'the plan is for 4 ranks, and there are 2'),
    ('another plan', 'predicted time is 1.0 on rank 0 but 2.0 on rank 1'),
    ('no prediction', 'predicts no time')])
def test_a_plan_that_does_not_fit_is_an_error_on_all(
        comm, tmp_path, kind, match):
    found = {'other ranks': plan(4), 'another plan': plan(
        seconds=1.0 + comm.rank), 'no prediction': plan_for(2, {})}[kind]
    with pytest.raises(ValueError, match=match):
        watched(comm, tmp_path, found, lambda _: STEP)


def test_arguments(tmp_path):
    for options, match in (({'interval': 0}, 'interval must be at least 1'),
                           ({'tolerance': 0.0}, 'tolerance must be above')):
        with pytest.raises(ValueError, match=match):
            PredictedTime(plan(1), **options)
    plan().save(str(tmp_path / 'plan.json'))
    planned = type('Planned', (), {'plan': plan()})()
    for one in plan(), planned, str(tmp_path / 'plan.json'):
        assert PredictedTime(one)._plan == plan()
