from chainer_fp8pipe.training.extensions.job_state import (
    collect,
    communicators,
    missing,
    movable,
)

import chainer
from mpi4py import MPI

from .stages import Stage, Updater, make_job, run

ALONE = MPI.COMM_SELF


class Marking(Updater):
    """An updater that has something to say for itself."""

    def serialize(self, serializer):
        super().serialize(serializer)
        serializer('mark', 1)


def job(tmp_path, layers=None, updater=Updater):
    """A trainer with some layers of the model, after some iterations."""
    trainer, _ = make_job(ALONE, tmp_path, 1, updater=updater)
    if layers is not None:
        model = Stage(layers)
        optimizer = trainer.updater.get_optimizer('main').setup(model)
        for _, parameter in model.namedparams():
            parameter.update_rule.hyperparam.alpha = 0.5
        optimizer.use_fp32_update()
    run(trainer, 2)
    return trainer


def test_a_rank_takes_what_belongs_to_its_layers(tmp_path):
    whole = collect(job(tmp_path, range(5)), ALONE)
    trainer = job(tmp_path, [2, 4])
    found = set(movable(list(whole), collect(trainer, ALONE), trainer))
    places = [f'{number}/{name}' for number in (2, 4) for name in 'Wb']
    kind = 'trainer/updater/model:main/'
    assert {key for key in found if key.startswith(kind)} == {
        kind + place for place in places}
    assert {key for key in found if key.startswith('optimizer/')} == {
        'optimizer/main/class', 'optimizer/main/values',
        *(f'optimizer/main/{place}/{name}' for place in places
          for name in ('class', 'values'))}
    kind = 'trainer/updater/optimizer:main/'
    assert {key for key in found if key.startswith(kind)} == {
        kind + 't', kind + 'epoch',
        *(f'{kind}{place}/{name}' for place in places for name in 'tmv')}
    assert {'trainer/updater/iteration', 'iterator/main/samples',
            'trainer/updater/iterator:main/current_position'} <= found
    assert not any(key.startswith('random/') for key in found)


def test_layer_1_is_not_taken_for_layer_11(tmp_path):
    whole = ['trainer/updater/optimizer:main/11/W/m',
             'trainer/updater/optimizer:main/1/W/m',
             'optimizer/main/11/W/float32', 'optimizer/main/1/W/float32']
    trainer = job(tmp_path, [1])
    assert movable(whole, collect(trainer, ALONE), trainer) == [
        whole[1], whole[3]]


def test_another_updater_may_have_values_of_its_own(tmp_path):
    saved = collect(job(tmp_path), ALONE)
    current = collect(job(tmp_path, updater=Marking), ALONE)
    assert missing(saved, current, exact=False) == ''
    assert missing(saved, current, exact=True) == (
        'trainer/updater/mark is not in the snapshot; build the trainer as '
        'it was, with the same extensions')


def test_a_parameter_is_named_before_its_optimizers_state(tmp_path):
    saved = collect(job(tmp_path, [0, 2]), ALONE)
    current = collect(job(tmp_path, [0, 2, 4]), ALONE)
    assert missing(saved, current, exact=False) in [
        f'parameter /4/{name} is not in the snapshot; build the model as it '
        'was' for name in 'Wb']


def test_optimizers_without_communicator_are_no_trouble(tmp_path):
    trainer = job(tmp_path)
    assert communicators(trainer, ALONE) == []
    trainer.updater._optimizers['other'] = chainer.optimizers.SGD().setup(
        Stage([0]))
    assert communicators(trainer, ALONE) == []
