"""A Divisible is measured by layers, trained as planned, and unchanged."""
import dataclasses
import functools
import json

from chainer_fp8pipe import Divisible, PipelineUpdater, lazy
from chainer_fp8pipe.pipeline.loss import LossHead
from chainer_fp8pipe.planner import planned_job, turns
from chainer_fp8pipe.planner.example import Example
from chainer_fp8pipe.planner.layers import (
    layer_figures,
    layer_passes,
    layers_alone,
)
from chainer_fp8pipe.planner.layers.layer_figures import measure_layers
from chainer_fp8pipe.planner.layers.layer_shapes import (
    layer_counts,
    layer_shapes,
)
from chainer_fp8pipe.planner.layers.layers_alone import LayersAlone
from chainer_fp8pipe.planner.planned_job import PlannedJob
from chainer_fp8pipe.planning.partition.intervals import Intervals
from chainer_fp8pipe.planning.partition.partition_plan import PartitionPlan
from chainer_fp8pipe.planning.partition.positions import Position

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from mpi4py import MPI

from tests.planner.test_planned_job import refused
from tests.ranks import on_ranks
from tests.training.updaters.networks import (
    NETWORKS,
    Plain,
    dataset,
    gathered,
    gradients,
    serial_gradients,
)
from tests.training.updaters.test_pipeline_updater import close, update

#: What is measured need not be right here.
plan = functools.partial(planned_job.plan, budget=0.3)
layer_figures._WORK, turns._ENOUGH = 0.01, 0.1


@functools.cache
def _planned(ranks):
    return plan(Plain(), dataset(12), MPI.COMM_WORLD, batch=12,
                stages=(ranks,)).plan


def planned_stages(comm):
    """A plan of as many stages as ranks, made once for all tests."""
    return PlannedJob(_planned(comm.size))


def measure(model, batch, loss_fun=F.softmax_cross_entropy, few=2,
            copies=True, comm=MPI.COMM_SELF):
    figures, _ = measure_layers(
        comm, model, Example(batch), loss_fun, chainer.optimizers.SGD(), few,
        copies)
    return figures


def content(model):
    """All values of a model, and what else measuring might change."""
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(model)
    found = {name: numpy.array(value)
             for name, value in serializer.target.items()}
    found.update({f'grad {name}': p.grad for name, p in model.namedparams()})
    return found


def is_built(model):
    return [getattr(slot, 'layer', slot) is not None
            for _, slot in model.numbered_slots()]


# --- as planned --------------------------------------------------------------

@on_ranks(2)
@pytest.mark.parametrize('network', NETWORKS)
def test_planned_stages_train_as_one_process_does(comm, network):
    inputs, labels = data = dataset(12, ignored=[2])
    planned = plan(NETWORKS[network](), data, comm, batch=12, stages=(2,),
                   codecs=('float32',))
    choice = planned.plan.choice
    assert (choice.stages, choice.replicas) == (2, 1)
    model = planned.partition(NETWORKS[network](), comm=comm)
    assert [end - start for start, end in model.layout] == layer_counts(
        choice.cut, model.total)
    updater = PipelineUpdater(
        chainer.iterators.SerialIterator(
            chainer.datasets.TupleDataset(*data), 12, shuffle=False),
        chainer.optimizers.SGD(0.0).setup(model), planned.grid(comm))
    seen = update(updater)
    assert updater.schedule.name == choice.schedule
    assert updater.schedule.micro_batches == choice.micro_batches
    sizes = [12 // choice.micro_batches + (
        part < 12 % choice.micro_batches)
        for part in range(choice.micro_batches)]
    loss, expected = serial_gradients(NETWORKS[network], data, sizes)
    assert seen['main/loss'] == pytest.approx(loss, rel=1e-6)
    close(gathered(comm, gradients(model)), expected)


@on_ranks(2)
def test_a_plan_keeps_its_counts_in_its_file_and_they_can_be_edited(comm):
    planned = planned_stages(comm)
    data = json.loads(json.dumps(planned.plan.as_dict()))
    cut = data['choice']['cut']
    chunks = len(cut['cuts']) + 1
    assert [place[0] for place in cut['order']] == [
        f'/{layer}' for layer in range(7)]
    assert all(one['calls_later'] == 0 for one in cut['cuts'])
    cut['cuts'] = [{'before': f'/{layer}', 'calls_later': 0}
                   for layer in range(1, chunks)]
    again = PlannedJob(data)
    assert str(again)
    model = again.partition(Plain(), comm=comm)
    assert [end - start for start, end in model.layout] == [
        *[1] * (chunks - 1), 8 - chunks]


@on_ranks(2)
def test_what_a_plan_recomputes_a_stage_does(comm):
    planned = planned_stages(comm)
    choice = planned.plan.choice
    again = (True,) * len(choice.cut.recompute)
    planned.plan = dataclasses.replace(planned.plan, choice=(
        dataclasses.replace(choice, cut=dataclasses.replace(
            choice.cut, recompute=again))))
    model = planned.partition(Plain(), comm=comm)
    updater = PipelineUpdater(
        chainer.iterators.SerialIterator(
            chainer.datasets.TupleDataset(*dataset(12)), 12),
        chainer.optimizers.SGD(0.0).setup(model), planned.grid(comm))
    assert len(updater._steps._recomputed) == len(again)


@on_ranks(2)
def test_without_stages_a_model_stays_whole(comm):
    planned = plan(Plain(), dataset(8), comm, stages=(1,))
    model = Plain()
    assert planned.partition(model, comm=comm) is model


@on_ranks(2)
def test_a_plan_is_for_one_model(comm):
    planned = planned_stages(comm)
    other = Divisible(*[L.Linear(8, 8) for _ in range(7)])
    with pytest.raises(ValueError, match='made for another model'):
        planned.partition(other, comm=comm)
    longer = Plain()
    longer.append(F.relu)
    with pytest.raises(ValueError, match='of 7 layers, and this one has 8'):
        planned.partition(longer, comm=comm)


@on_ranks(2)
def test_nothing_is_built_to_be_planned_or_cut(comm):
    model = Plain()
    planned = plan(model, dataset(8), comm, stages=(2,))
    assert is_built(model) == [False, True] * 3 + [False]
    assert planned.plan.model['/0/W'] == [12, 8]
    part = planned.partition(model, comm=comm)
    mine = [number in range(*bounds) for number in range(7)
            for bounds in part.bounds[:1]]
    assert part.bounds[1:] or is_built(model) == [
        here or number % 2 == 1 for number, here in enumerate(mine)]
    everyone = comm.allgather([name for name, _ in part.namedparams()])
    assert sorted(sum(everyone, [])) == sorted(planned.plan.model)


@on_ranks(2)
def test_what_is_no_whole_model_with_a_target_is_refused(comm):
    data = dataset(8)
    refused(comm, 'must be a tuple.*the target last', model=Plain(),
            example=data[0])
    refused(comm, 'must be a tuple', model=Plain(), example=data[:1])
    refused(comm, 'is a part already', model=Plain().divide(0, 3),
            example=data)
    refused(comm, 'has no layer', model=Divisible(), example=data)


@on_ranks(2)
def test_a_layer_that_fails_is_named_on_all_ranks(comm):
    def broken(h):
        raise RuntimeError('no such thing')
    refused(comm, r'layer 1 \(broken\).*no such thing', model=Divisible(
        L.Linear(8, 5), broken), example=dataset(8))
    refused(comm, 'the loss', model=Divisible(L.Linear(8, 5)),
            example=dataset(8), loss_fun=lambda y, t: 3)


# --- what is measured --------------------------------------------------------

@on_ranks(1, 2)
@pytest.mark.parametrize('network', NETWORKS)
@pytest.mark.parametrize(('copies', 'built'), [
    (True, True), (False, True), (True, False)])
def test_every_layer_is_a_call(comm, network, copies, built):
    model = NETWORKS[network]()
    if built:
        list(model)
        numpy.random.seed(7)
        model(dataset(8)[0])            # finds out all shapes
        model.cleargrads()
    before = content(model) if built else {}
    state = numpy.random.get_state()[1].copy()
    figures = measure(model, dataset(8), copies=copies, comm=comm)
    assert comm.allgather(figures.plain) == [figures.plain] * comm.size
    numpy.testing.assert_array_equal(numpy.random.get_state()[1], state)
    after = content(model) if built else {}
    for name, value in before.items():
        numpy.testing.assert_array_equal(after[name], value, name)
    assert (figures.samples, figures.few) == (8, 2)
    for calls, samples in ((figures.calls, 8), (figures.calls_few, 2)):
        assert len(calls) == model.total + 1
        assert [call.link for call in calls[:-1]] == [
            f'/{number}' for number in range(model.total)]
        assert calls[-1].name == 'loss'
        for call in calls[:-1]:
            assert call.forward > 0
            assert 0 <= call.deferrable <= 1
            assert call.outputs[0].shape[0] == samples
    # Parameters are those of the whole model, once each.
    model(dataset(8)[0])
    assert {name: one.shape for name, one in figures.parameters.items()
            } == {name: one.shape for name, one in model.namedparams()}
    assert [group[0] for group in figures.order] == [
        f'/{number}' for number in range(model.total)]
    assert sorted(sum(figures.buckets, ())) == sorted(figures.parameters)
    assert figures.ghost.value == 0
    assert min(*figures.plain, *figures.plain_few) > 0


def intervals(figures):
    return Intervals(figures.calls, figures.order, figures.parameters)


def test_a_cut_is_possible_between_any_two_layers():
    figures = measure(Plain(), dataset(8))
    assert intervals(figures).starts == [
        Position(number, 0) for number in range(7)]
    # Eight samples of twelve numbers cross.
    assert intervals(figures).crossing[1:7].tolist() == [8 * 12 * 4] * 6


def test_layers_that_share_parameters_are_not_cut_apart():
    shared = L.Linear(8, 8)
    for model in (Divisible(F.relu, shared, F.relu, shared, L.Linear(8, 5)),
                  Divisible(F.relu, *[lazy(L.Linear, 8, 8)] * 3,
                            L.Linear(8, 5))):
        figures = measure(model, dataset(8))
        assert intervals(figures).starts == [
            Position(0, 0), Position(1, 0), Position(4, 0)]
        assert set(figures.parameters) == {'/1/W', '/1/b', '/4/W', '/4/b'}
        assert intervals(figures).parameters[1, 2] == 4 * (8 * 8 + 8)


def test_arrays_that_backward_needs_are_retained():
    """tanh keeps its output, a product its input; sums keep nothing."""
    model = Divisible(L.Linear(8, 64), F.tanh, lambda h: h + 1,
                      L.Linear(64, 5))
    calls = measure(model, dataset(8)).calls
    assert [[source.call for source in call.retained]
            for call in calls[:4]] == [[], [1], [], [2]]
    assert [call.kept for call in calls[:4]] == [0] * 4


def test_bytes_inside_of_a_layer_are_weighed():
    def twice(h):
        return F.sum(F.tanh(F.exp(F.broadcast_to(
            h[:, :, None], (*h.shape, 1000)))), axis=2)
    model = Divisible(L.Linear(8, 16), twice, L.Linear(16, 5))
    large, small = (of[1] for of in (
        lambda found: (found.calls, found.calls_few))(
            measure(model, dataset(8))))
    # What exp and tanh give.
    assert large.kept == pytest.approx(2 * 8 * 16 * 1000 * 4, rel=.05)
    assert small.kept == pytest.approx(2 * 2 * 16 * 1000 * 4, rel=.05)


class _Products(chainer.FunctionHook):
    """Counts products of matrices: a clock that no load disturbs."""

    def __init__(self):
        self.count = 0

    def forward_postprocess(self, function, in_data):
        self.count += function.label.startswith('Linear')


def test_gradients_of_weights_can_wait_where_they_are_separate(monkeypatch):
    model = Divisible(L.Linear(8, 6), F.relu, L.Linear(6, 6), F.relu,
                      L.Linear(6, 5))
    products = _Products()
    monkeypatch.setattr(layer_passes, 'clock_of',
                        lambda device: lambda: products.count)
    with products:
        (calls,), _, _ = LayersAlone(
            model, chainer.backend.CpuDevice()).measured(
                [dataset(8)], LossHead(F.softmax_cross_entropy, {}, None))
    # The first layer's input needs no gradient: all of it can wait.
    assert [call.deferrable for call in calls[:5]] == [1, 0, .5, 0, .5]


def test_layers_that_must_not_run_twice_say_so():
    model = Divisible(L.Linear(8, 12), L.BatchRenormalization(12),
                      L.Linear(12, 5))
    assert [call.once for call in measure(model, dataset(8)).calls] == [
        False, True, False, False]


def test_functions_that_use_links_of_their_own_leave_no_gradients():
    link = L.Linear(8, 5)
    link.cleargrads()
    measure(Divisible(lambda x: link(x)), dataset(8), copies=False)
    assert link.W.grad is None


def test_tuples_travel_whole():
    """An array, another one and integers go on from layer to layer."""
    calls = measure(NETWORKS['Skipping'](), dataset(8)).calls
    assert [value.dtype.kind for value in calls[1].outputs.values()] == [
        'f', 'f', 'i']
    assert len(calls[2].inputs) == 3


def test_another_loss_is_that_of_its_function():
    calls = measure(Divisible(L.Linear(8, 3)), (
        numpy.zeros((6, 8), 'f'), numpy.zeros((6, 3), 'f')),
        F.mean_squared_error).calls
    assert calls[-1].name == 'loss'
    assert calls[-1].inputs == ((0, 0),)


# --- counts and shapes -------------------------------------------------------

def cut(*places, layers=5, depth=0):
    return PartitionPlan(
        tuple((f'/{number}',) for number in range(layers)),
        tuple(Position(place, depth) for place in places), len(places) + 1,
        (False,) * (len(places) + 1), 2, '1f1b')


def test_counts_are_the_distances_of_cuts():
    assert layer_counts(cut(1, 4), 5) == [1, 3, 1]
    assert layer_counts(cut(), 5) == [5]
    with pytest.raises(ValueError, match='of 5 layers, and this one has 6'):
        layer_counts(cut(1, 4), 6)
    with pytest.raises(ValueError, match='calls_later must be 0'):
        layer_counts(cut(1, depth=2), 5)


def test_shapes_of_layers_that_are_not_built_are_those_of_the_plan():
    model = Divisible(L.Linear(3, 2), F.relu, lazy(L.Linear, 2, 4),
                      L.Linear(None, 2))
    planned = {'/0/W': (9, 9), '/2/W': (4, 2), '/2/b': (4,), '/20/W': (1,)}
    assert layer_shapes(model, planned) == {
        '/0/W': (2, 3), '/0/b': (2,), '/2/W': (4, 2), '/2/b': (4,),
        '/3/W': None, '/3/b': (2,)}
    assert is_built(model) == [True, True, False, True]


def test_arrays_without_weak_references_are_taken_to_be_kept():
    class Slotted:
        __slots__ = ()
    thing = Slotted()
    assert layers_alone._reference(thing)() is thing
