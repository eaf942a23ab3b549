"""What is tried, what is taken, and what stays as it was."""
import dataclasses
import random
import time

from chainer_fp8pipe import create_grouped_bn_model
from chainer_fp8pipe.planner.job_plan import JobPlan, Trial, Way
from chainer_fp8pipe.planner.plan import plan, preferred
from chainer_fp8pipe.planner.trials import Example, Trained, Trials

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
import pytest
from chainer.iterators import SerialIterator
from chainer.training import StandardUpdater

from tests.planner.plans import stages
from tests.ranks import on_ranks


class Net(chainer.Chain):
    """With running averages and random numbers, from Python's generator, too.

    ``seconds`` pass in the first updates.
    """

    def __init__(self, units=16, seconds=(), reads=False):
        super().__init__(fc1=L.Linear(6, units), bn=L.BatchNormalization(
            units), fc2=L.Linear(units, 3))
        self.seconds, self.reads = list(seconds), reads

    def forward(self, x, t):
        time.sleep(self.seconds.pop(0) if self.seconds else 0)
        h = F.relu(self.bn(self.fc1(x)))
        if self.reads and float(h.array.sum()) < 0:
            h = -h
        h = F.dropout(h, random.random() / 100)
        return F.softmax_cross_entropy(self.fc2(h), t)


def batch(samples=8, seed=0):
    generator = numpy.random.RandomState(seed)
    return (generator.rand(samples, 6).astype('f'),
            generator.randint(0, 3, samples).astype('i'))


def content(link):
    """All values of a link or an optimizer."""
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(link)
    return {name: numpy.array(value)
            for name, value in serializer.target.items()}


# --- what is taken ----------------------------------------------------------

EXACT, FP8, OVERLAP = Way(2), Way(2, None, 'fp8'), Way(2, None, 'float32', {
    'overlap': True})
STAGES = stages(2).choice


NAIVE = Way(2, None, 'naive')


@pytest.mark.parametrize(('seconds', 'as_it_is', 'taken'), [
    # Whatever is noisy is not preferred for it.
    ([(FP8, [.010] * 10), (EXACT, [
        .010, .012, .017, .018, .018, .018, .045, .048, .050, .055])],
     None, FP8),
    ([(EXACT, [.010] * 10), (FP8, [.007, .0098, .02])], None, EXACT),
    # Of what is equally fast the exact one, and then the simplest.
    ([(FP8, [1.00] * 5), (EXACT, [1.02] * 5)], None, EXACT),
    ([(FP8, [1.00] * 5), (EXACT, [1.05] * 5)], None, FP8),
    ([(OVERLAP, [1.0] * 5), (STAGES, [1.0] * 5), (EXACT, [1.02] * 5)],
     None, EXACT),
    ([(EXACT, [1.0] * 5), (NAIVE, [1.01] * 5)], None, NAIVE),
    # Or the script's own.
    ([(FP8, [1.02] * 5), (EXACT, [1.0] * 5)], FP8, FP8),
    ([(FP8, [1.05] * 5), (EXACT, [1.0] * 5)], FP8, EXACT),
    ([(Way(), [1.02] * 5), (EXACT, [1.0] * 5)], Way(), Way()),
    # Both are uncertain, but not by so much.
    ([(FP8, [.5, 1, 1.5]), (EXACT, [1.0, 1.5, 2.0])], None, FP8)])
def test_the_fastest_is_taken_and_the_simplest_of_equal_ways(
        seconds, as_it_is, taken):
    took = {str(way): blocks for way, blocks in seconds}
    trials = Trials(lambda way: took[str(way)], str)
    for way, _ in seconds:
        trials.add(way)
    assert preferred(trials.found, as_it_is) == taken


def test_near_ways_are_tried_again_and_others_are_left_when_time_is_over():
    said, left = [], [100.0]
    slow, late = Way(2, None, 'int4'), Way(2, None, 'float16')
    times = {str(way): seconds for way, seconds in (
        (EXACT, 1.0), (FP8, 1.2), (slow, 3.0), (late, 1.0))}

    def run(way):
        if len(said) > 8:
            raise ValueError('no memory')
        return [times[str(way)]] * 3
    trials = Trials(run, said.append, lambda: left[0])
    for way in EXACT, FP8, FP8, slow:
        trials.add(way)
    left[0] = 4.0
    trials.add(late)
    trials.again()
    assert said == [f'trying {way}' for way in (EXACT, FP8, slow)]
    assert trials.remarks == [f'{late} was not tried: the time was over']
    left[0] = 100.0
    trials.again()
    assert set(said[3:]) == {f'trying {way}' for way in (EXACT, FP8)}
    assert len(said) == 3 + 2 * 3
    # One that fails leaves what was found.
    assert {str(way) for way, _ in trials.found} == {
        str(way) for way in (EXACT, FP8, slow)}
    assert trials.remarks[1:] == [f'{EXACT} was not tried again: no memory']


# --- plan() -----------------------------------------------------------------

def planned_of(model, comm, examples=None, budget=1.0, codecs=('float32',),
               is_shared=False):
    """The plan of a script with an updater for a model or an optimizer."""
    optimizer = model if isinstance(
        model, chainer.Optimizer) else chainer.optimizers.Adam().setup(model)
    examples = examples or list(zip(*batch(8 * comm.size), strict=True))
    count = len(examples) // (1 if is_shared else comm.size)
    updater = StandardUpdater(
        SerialIterator(examples, count, shuffle=False), optimizer)
    return plan(Trained(
        updater, optimizer, Example(updater.converter(examples)),
        len(examples), is_shared), comm, codecs, budget, str,
        Way() if is_shared else None)


@on_ranks(1, 4)
def test_ways_are_tried_on_copies_and_the_fastest_is_the_plan(comm):
    """What comes once is not timed, and all stays as it was."""
    model = Net(seconds=[.2, .2])
    optimizer = chainer.optimizers.Adam().setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))
    before = content(model), content(optimizer)
    random.seed(7), numpy.random.seed(7)
    states = random.getstate(), numpy.random.get_state()[1].copy()
    codecs = ('float32', 'fp8')
    planned = planned_of(optimizer, comm, budget=1.5, codecs=codecs,
                         is_shared=True)
    assert random.getstate() == states[0]
    numpy.testing.assert_array_equal(numpy.random.get_state()[1], states[1])
    for old, link in zip(before, (model, optimizer), strict=True):
        for name, value in content(link).items():
            numpy.testing.assert_array_equal(value, old[name], name)
    assert len(model.seconds) == 2
    count = comm.size
    ways = [Way(count, None, codec) for codec in codecs] + [
        Way(count, None, codec, {'overlap': True}) for codec in codecs] + [
        Way(count, None, 'naive')] if count > 1 else [Way()]
    known = ' '.join([*(one.way for one in planned.trials), *planned.remarks])
    assert all(str(way) in known for way in ways)
    assert count == 1 or '2 stages' in known
    assert [one.seconds for one in planned.trials] == sorted(
        one.seconds for one in planned.trials)
    assert str(planned.choice) in [one.way for one in planned.trials]
    assert planned.trials[0].seconds < .2
    assert (planned.ranks, planned.batch) == (count, 8 * count)
    assert comm.allgather(planned) == [planned] * count


@on_ranks(2)
@pytest.mark.parametrize('kind', ['grouped', 'mnbn', 'reads'])
def test_a_model_that_cannot_be_cut_is_planned_with_replicas(comm, kind):
    model = Net(reads=kind == 'reads')
    if kind == 'grouped':
        model = create_grouped_bn_model(model, comm)
    elif kind == 'mnbn':
        model = chainermn.links.create_mnbn_model(
            model, chainermn.create_communicator('naive', comm))
    planned = planned_of(model, comm)
    assert planned.choice.replicas == 2
    assert not [one for one in planned.trials if 'stages' in one.way]


def refused(comm, message, *given):
    with pytest.raises(ValueError, match=message) as found:
        planned_of(*given[:1], comm, *given[1:])
    assert comm.allgather(type(found.value)) == [ValueError] * comm.size


@on_ranks(2)
def test_what_cannot_be_planned_is_an_error_on_all_ranks(comm):
    refused(comm, 'the model is', Net(8 + comm.rank))
    # Nobody can train this one, and it says why.
    refused(comm, 'no way to train this model could be tried: .*InvalidType',
            Net(), [(numpy.zeros(5, 'f'), numpy.int32(0))] * 4)


# --- files ------------------------------------------------------------------

@pytest.mark.parametrize('choice', [
    EXACT, STAGES, Way(2, None, 'fp8', {'warmup': 7, 'overlap': True})])
def test_a_plan_survives_its_file(tmp_path, choice):
    made = JobPlan(choice, 2, 60, (
        Trial(str(choice), 1.0, .1), Trial('x', 2.0)), ('r',))
    path = str(tmp_path / 'plan.json')
    made.save(path)
    assert JobPlan.load(path) == made
    assert str(JobPlan.load(path)) == str(made)


@pytest.mark.parametrize(('where', 'value', 'message'), [
    (('cuts',), [], 'cuts is no field of a plan'),
    (('ranks',), 0, 'replicas are not 0 ranks'),
    (('ranks',), 3, '2 stages x 1 replicas are not 3 ranks'),
    (('choice', 'communicator'), 'fp9', 'communicator must be one of .*fp8'),
    (('choice', 'codec'), 'fp8', 'choice.codec is no field of a plan'),
    (('choice', 'options'), [], 'choice.options must be an object'),
    (('choice',), ..., 'choice is missing'),
    (('trials', 0, 'seconds'), -1, 'seconds must be 0 or more')])
def test_what_is_wrong_in_a_file_is_named(where, value, message):
    plan = JobPlan(**{**vars(stages(2)), 'trials': (Trial('x', 1.0),)})
    data = dataclasses.asdict(plan)
    inner, (*path, last) = data, where
    for name in path:
        inner[name] = dict(inner[name]) if isinstance(
            inner[name], dict) else list(inner[name])
        inner = inner[name]
    inner[last] = value
    if value is ...:
        del inner[last]
    with pytest.raises(ValueError, match=message) as found:
        JobPlan.load(data)
    assert str(found.value).startswith('the plan: ')
    assert str(found.value).endswith('plan -o FILE SCRIPT')
