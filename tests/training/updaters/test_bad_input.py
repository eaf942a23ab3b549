"""Whatever is wrong on one rank is a clear error on every rank."""
import contextlib
import itertools
import json
import sys
import warnings

from chainer_fp8pipe import (
    Divisible,
    PipelineUpdater,
    atomic,
    deferred,
    partition,
)
from chainer_fp8pipe.planning.cuts import DoesNotFit

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from mpi4py import MPI

from tests.ranks import on_ranks
from tests.training.updaters.networks import Plain, dataset
from tests.training.updaters.partitions import (
    Batches,
    as_it_is,
    batch_of,
    make,
    updater_of,
)
from tests.training.updaters.test_pipeline_updater import make_updater

X = np.random.RandomState(0).randn(8, 4).astype('f')


class Net(chainer.Chain):
    """Calls a function between its layers."""

    def __init__(self, between=F.relu, width=5, ends=1):
        super().__init__()
        self.between = between
        with self.init_scope():
            self.l1, self.l2 = L.Linear(4, width), L.Linear(width, width)
            self.l3 = L.Linear(width, ends)

    def forward(self, x):
        return F.sum(self.l3(F.tanh(self.l2(self.between(self.l1(x))))))


def cut(comm, model=None, **options):
    model = Net() if model is None else model
    return partition(model, (X[:4],), comm, **{'micro_batches': 2,
                                               **options})


# --- partition() -----------------------------------------------------------

def looking(h):
    if h.array.max() > 0:           # here
        return h
    return -h


def unchained(h):
    h.unchain_backward()            # cut
    return h


def gone_back(h):
    x = chainer.Variable(h.array)
    chainer.backward([F.sum(x ** 2)])       # back
    return h + x.grad


def failing_on_rank_1(rank):
    def fails(h):
        if rank == 1:
            raise KeyError('only here')
        return h
    return fails


class Returning(Net):
    """Makes something else of its loss."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, x):
        return self.made(super().forward(x))


def differing(name, here, there, said=None):
    """An option that rank 1 gets otherwise."""
    return (fr'{name} is {said or here!r} on rank 0 but {there!r} on rank 1\.'
            r' Pass the same to partition\(\) on all ranks',
            lambda rank: {'schedule': 'interleaved', 'chunks': 1,
                          name: there if rank else here})


HERE = looking.__code__.co_firstlineno + 1
#: What is said, and the model and options of a rank.
REFUSED = {
    'ends where the stage does': (
        r'bad_input.py:\d+: unchain_backward\(\) in forward .* '
        r'chainer.Variable\(x.array\)',
        lambda rank: {'model': Net(unchained)}),
    'way back in forward': (r'bad_input.py:\d+: a gradient needs .*atomic',
                            lambda rank: {'model': Net(gone_back)}),
    'looks at values': (
        fr'test_bad_input.py:{HERE}: .*LinearFunction in /l1.*'
        r'chainer_fp8pipe.atomic', lambda rank: {'model': Net(looking)}),
    'another shape': (
        r'parameter /\S+ is float32 \(5, .*on rank 0 but float32 \(6, .*'
        'Build the same model on all ranks',
        lambda rank: {'model': Net(width=5 + (rank == 1))}),
    'other calls': (
        'must not depend on the rank',
        lambda rank: {'model': Net(F.sigmoid if rank else F.relu)}),
    'fails on one rank': (
        "rank 1: KeyError: 'only here'",
        lambda rank: {'model': Net(failing_on_rank_1(rank))}),
    'no scalar': ('must return its loss, a scalar', lambda rank: {
        'model': Returning(lambda y: y.reshape(1, 1) * np.ones((2, 1), 'f'))}),
    'no variable': ('must return its loss, a scalar', lambda rank: {
        'model': Returning(lambda y: np.zeros(()))}),
    'no model': ('takes a chainer.Link, not function',
                 lambda rank: {'model': looking}),
    'layers': ('a Divisible is cut by its stage',
               lambda rank: {'model': Divisible(L.Linear(4, 4))}),
    'memory': ("'much' is no size; write it as in",
               lambda rank: {'memory': 'much'}),
    'memory of one rank': ("'much' is no size", lambda rank: {
        'memory': 'much' if rank else None}),
    'recompute': ("recompute must be 'auto', True or False, not 'often'",
                  lambda rank: {'recompute': 'often'}),
    'optimizer_arrays': ('optimizer_arrays must be a number',
                         lambda rank: {'optimizer_arrays': -1}),
    'optimizer_arrays, a text': ("not '2'",
                                 lambda rank: {'optimizer_arrays': '2'}),
    'schedule': ('schedule.*2f2b', lambda rank: {'schedule': '2f2b'}),
    'micro_batches': ("micro_batches is '4'; it must be a whole number",
                      lambda rank: {'micro_batches': '4'}),
    'chunks': ("'1f1b' has one chunk per rank, not 2",
               lambda rank: {'chunks': 2}),
    **{f'other {option[0]}': differing(*option) for option in (
        ('micro_batches', 2, 4), ('schedule', '1f1b', 'gpipe'),
        ('chunks', 1, 2), ('optimizer_arrays', 1, 2),
        ('memory', '1 GB', None, 1e9))},
    'other recompute': (
        "recompute is True on rank 0 but 'auto' on rank 1",
        lambda rank: {'recompute': 'auto' if rank else True}),
    'no plan': ('is no plan', lambda rank: {'plan': {}}),
}


def refused(comm, match, error=ValueError, **options):
    with pytest.raises(error, match=match):
        cut(comm, **options)
    cut(comm)               # and nothing is left behind


@pytest.mark.parametrize('wrong', REFUSED)
@on_ranks(2)
def test_what_cannot_be_cut_is_refused_on_all_ranks(comm, wrong):
    match, options = REFUSED[wrong]
    refused(comm, match, **options(comm.rank))


@on_ranks(1, 3)
def test_other_numbers_of_ranks_refuse_as_well(comm):
    refused(comm, 'atomic', model=Net(looking))
    cut(comm, Net(atomic(looking)))
    refused(comm, 'was cut already; build it anew', model=cut(comm))
    if comm.size == 3:
        refused(comm, 'into 2 parts at most, but 3 are asked for; use fewer '
                'ranks', model=chainer.Sequential(L.Linear(4, 1), F.sum))


@pytest.mark.parametrize('name', ['halting', 'actor_critic',
                                  'moving_average'])
@on_ranks(2)
def test_models_of_the_collection_that_look_are_refused(comm, name):
    with pytest.raises(ValueError, match=r'tests/models/vectors.py:\d+: '
                       r'.*chainer_fp8pipe\.atomic'):
        partition(make(name), batch_of(name, samples=4), comm)


@on_ranks(2)
def test_a_cut_or_an_example_that_does_not_fit_is_an_error(comm):
    refused(comm, r'no cut into 2 stages fits into 1 kB per rank.*A rank '
            'takes 16 MB for code and buffers', DoesNotFit, memory='1 kB')
    with pytest.raises(ValueError, match='examples of the same shapes'):
        partition(Net(), (X[:4 + comm.rank],), comm)


@on_ranks(2)
def test_a_plan_that_is_not_this_models_is_refused(comm, tmp_path):
    plan = cut(comm).plan
    good = plan.as_dict()
    refused(comm, 'rank 1: a plan is given on this rank, and none on rank 0',
            plan=plan if comm.rank else None)
    refused(comm, r'plan is for 1 stages, and there are 2', plan=dict(
        good, stages=1))
    refused(comm, 'knows a parameter /x/W, which the model has not',
            plan=dict(good, order=[['/x/W'], *good['order']]))
    refused(comm, 'before /nowhere', plan=dict(
        good, cuts=[{'before': '/nowhere', 'calls_later': 0}]))
    path = tmp_path / 'plan.json'
    if comm.rank == 0:
        path.write_text(json.dumps(good)[:-30])
    comm.Barrier()
    refused(comm, 'plan.json is no JSON', plan=str(path))
    refused(comm, 'no_such.json', FileNotFoundError,
            plan=str(tmp_path / 'no_such.json'))


@pytest.mark.parametrize('deferring', [True, False])
@on_ranks(2)
def test_initial_values_that_one_rank_cannot_draw_fail_on_all(comm,
                                                              deferring):
    """The last layer's weights are no square."""
    with deferred() if deferring else contextlib.nullcontext():
        model = Net()
        del model.l3
        with model.init_scope():
            model.l3 = L.Linear(5 if deferring else None, 1,
                                initialW=chainer.initializers.Identity())
    refused(comm, 'rank [01]: ValueError: the initial values of /l3/W: '
            'ValueError: Identity matrix', model=model)


@on_ranks(2)
def test_a_parameter_that_one_rank_has_drawn_is_still_deferred(comm):
    with deferred():
        model = Net()
    if comm.rank:
        model.l1.W.array, model.l3.W.array  # noqa: B018
    cut(comm, model)
    assert all(parameter.array.any() for name, parameter
               in model.namedparams() if name.endswith('W'))


@on_ranks(2)
def test_after_a_cut_an_error_ends_all_ranks(comm):
    before, sys.excepthook = sys.excepthook, sys.__excepthook__
    try:
        model = cut(comm)
        assert sys.excepthook is not sys.__excepthook__
    finally:
        sys.excepthook = before
    with pytest.raises(RuntimeError, match='is on several ranks.*update'):
        model(X)


# --- updaters --------------------------------------------------------------

#: Of a list of layers, on rank 1 or on both: what is said, and options.
OPTIONS = {
    'schedule': ('gpipe, 1f1b, interleaved, zero_bubble', 'zigzag'),
    'recompute': ("'every stage but the last'", 'some'),
    'micro_batches': ('must be a positive integer, not 2.0', 2.0),
    'activation_codec': ('fp8', 'fp4'),
    'label_key': ('label_key must be', 1.5),
    'loss_fun': ('loss_fun must be a function', 'mse'),
    'loss_weight': ('loss_weight must be a function', 2),
    'metrics': ("other than 'loss'", {'loss': F.accuracy}),
    'seed': ('seed must be an integer', 'one'),
}


@on_ranks(1, 2)
@pytest.mark.parametrize('option', OPTIONS)
def test_an_unknown_option_is_an_error_that_lists_the_known(comm, option):
    said, value = OPTIONS[option]
    with pytest.raises(ValueError, match=said):
        make_updater(comm, Plain, dataset(8), **{option: value})
    if option == 'metrics':
        with pytest.raises(ValueError, match='and functions or pairs'):
            make_updater(comm, Plain, dataset(8),
                         metrics={'right': 'accuracy'})


@on_ranks(2, 3)
@pytest.mark.parametrize(('option', 'values'), [
    ('micro_batches', (2, 3)), ('schedule', ('gpipe', '1f1b')),
    ('seed', (0, 1)), ('recompute', (True, False)),
    ('activation_codec', (None, 'fp8'))])
def test_options_that_differ_between_ranks_are_an_error(
        comm, option, values):
    value = values[comm.rank == comm.size - 1]
    with pytest.raises(ValueError, match=f'{option} is .* on rank 0 but .* '
                       f'on rank {comm.size - 1}'):
        make_updater(comm, Plain, dataset(8), **{option: value})


@on_ranks(2)
def test_a_bad_option_on_one_rank_is_an_error_on_all(comm):
    with pytest.raises(ValueError, match='rank 1: ValueError: micro_batches '
                                         'must be a positive integer'):
        make_updater(comm, Plain, dataset(8), micro_batches=4 * (
            comm.rank == 0))


@on_ranks(2)
def test_what_an_updater_cannot_train_is_refused(comm):
    def refused_by(match, model, ranks=comm, **options):
        with pytest.raises(ValueError, match=match):
            PipelineUpdater(Batches((X,)), chainer.optimizers.SGD().setup(
                model), ranks, converter=as_it_is, **options)
    refused_by(r'must be set up with a Divisible .*partition\(model, example, '
               'comm', Net())
    model = cut(comm)
    for other in (comm.Dup(), MPI.COMM_SELF):
        refused_by('cut for other ranks; give PipelineUpdater the comm that '
                   'partition', model, other)
    refused_by('seed', model, seed=comm.rank)
    for options, said in (
            ({'loss_fun': F.mean_squared_error}, 'loss_fun'),
            ({'metrics': {}}, 'metrics'), ({'label_key': 'label'},
                                           'label_key'),
            ({'loss_fun': F.mean_squared_error, 'label_key': 0},
             'loss_fun and label_key')):
        refused_by(f'{said} cannot be given', cut(comm), **options)
    model = cut(comm)
    PipelineUpdater(Batches((X,)), chainer.optimizers.SGD().setup(model),
                    comm)
    refused_by('another optimizer trains', model)


@on_ranks(2)
@pytest.mark.parametrize(('cuts', 'said'), [
    ([(0, 7), (0, 7)],
     'rank 1 starts at layer 0 but layer 7 is to follow'),
    ([(0, 4), (4, 6)], 'rank 1 ends at layer 5 but the model has 7 layers'),
    ([(0, 4), (5, 7)],
     'rank 1 starts at layer 5 but layer 4 is to follow'),
])
def test_stages_that_do_not_make_up_the_model_are_an_error(comm, cuts, said):
    model = Plain().divide(*cuts[comm.rank])
    iterator = chainer.iterators.SerialIterator([0], 1)
    with pytest.raises(ValueError, match=said):
        PipelineUpdater(iterator, chainer.optimizers.SGD().setup(model), comm)


# --- updates ---------------------------------------------------------------

def fails(updater, match):
    with pytest.raises((RuntimeError, ValueError), match=match):
        updater.update()


def _none(x):
    return None


class Backward(chainer.FunctionNode):
    broken = True

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, gradients):
        if self.broken:
            raise ArithmeticError('on the way back')
        return gradients


def _fails_in_backward(x):
    return Backward().apply((x,))[0]


def four(bad, place):
    """Layers, of which one is bad."""
    layers = [L.Linear(8, 8), F.relu, F.tanh, L.Linear(8, 5)]
    layers[place:place + (bad is _none)] = [bad]
    return layers


#: What is said of an update, layers, and options.
LAYERS = {
    **{f'{_none.__name__} {place}, {schedule}': (
        fr'layer {place} \(_none\), micro-batch 0: TypeError: it returned '
        'None', lambda place=place: four(_none, place),
        {'schedule': schedule})
       for place in range(4) for schedule in ('1f1b', 'zero_bubble')},
    **{f'backward {place}, {schedule}': (
        fr'the backward pass of layer {place} \(_fails_in_backward\), '
        'micro-batch 0: ArithmeticError',
        lambda place=place: four(_fails_in_backward, place),
        {'schedule': schedule})
       for place in (1, 2, 3) for schedule in ('1f1b', 'zero_bubble')},
    'shapes': (r'layer 1 \(Linear\), micro-batch 0: .*InvalidType', lambda: [
        L.Linear(8, 7), L.Linear(6, 4), F.relu, L.Linear(4, 5)], {}),
    'no scalar': ('the loss, micro-batch 0: .*must return a scalar',
                  lambda: four(F.relu, 1), {'loss_fun': lambda y, t: y}),
    # Losses of (n, 1) outputs and (n,) targets would be of (n, n).
    'broadcast': ('the loss.*InvalidType', lambda: [
        L.Linear(8, 4), F.relu, F.tanh, L.Linear(4, 1)],
        {'loss_fun': lambda y, t: F.mean_squared_error(
            y, t.astype('f'))}),
    **{f'label_key {key!r}': (
        f'an example has 2 elements, and none is label_key={key!r}',
        lambda: four(F.relu, 1), {'label_key': key})
       for key in ('label', 2, -3)},
    'small batch': ('a batch of 8 cannot be cut into 9 micro-batches; lower',
                    lambda: four(F.relu, 1), {'micro_batches': 9}),
}


@on_ranks(1, 2, 4)
@pytest.mark.parametrize('wrong', LAYERS)
def test_a_failing_update_of_layers_is_an_error_on_every_rank(comm, wrong):
    match, layers, options = LAYERS[wrong]
    fails(make_updater(comm, lambda: Divisible(*layers()), dataset(8),
                       **{'micro_batches': 2, **options}), match)


@on_ranks(2)
def test_the_rank_that_failed_has_its_own_exception(comm):
    updater = make_updater(comm, lambda: Divisible(L.Linear(8, 5), F.relu),
                           dataset(8), micro_batches=2,
                           loss_fun=lambda y, t: y)
    with pytest.raises(RuntimeError) as caught:
        updater.update()
    names = comm.allgather(type(caught.value).__name__)
    assert names == ['RemoteError', 'LayerError']
    assert comm.rank == 1 or str(caught.value).startswith('rank 1: the loss')
    with pytest.raises(ValueError, match='failed before.*the loss.*make a '
                                         'new updater'):
        updater.update()
    make_updater(comm, Plain, dataset(8), micro_batches=2).update()


class Broken(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 4

    def get_example(self, i):
        raise OSError('unreadable')


@on_ranks(1, 2)
@pytest.mark.parametrize(('data', 'said'), [
    (Broken(), 'OSError: unreadable'),
    (dataset(8)[0], 'an example has no target')])
def test_examples_that_cannot_be_read_are_an_error(comm, data, said):
    fails(PipelineUpdater(
        chainer.iterators.SerialIterator(data, 4),
        chainer.optimizers.SGD().setup(Plain().stage(comm)), comm,
        micro_batches=2), said)


@on_ranks(2)
def test_a_gradient_of_zeros_is_no_error(comm):
    inputs, labels = dataset(8)
    labels[:] = -1          # nothing counts
    updater = make_updater(comm, Plain, (inputs, labels), micro_batches=2)
    updater.update()
    assert all(not np.any(parameter.grad) for parameter
               in updater.get_optimizer('main').target.params())


@on_ranks(2)
@pytest.mark.parametrize(('prepare', 'said'), [
    ('clip', 'the gradient clipping is'),
    ('scale', 'dynamic loss scaling is'),
])
def test_decisions_of_one_stage_alone_are_an_error(comm, prepare, said):
    optimizer = chainer.optimizers.SGD()
    updater = make_updater(comm, Plain, dataset(8), optimizer,
                           micro_batches=2)
    if comm.rank == 0 and prepare == 'clip':
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.0))
    if prepare == 'scale':
        optimizer.loss_scaling(scale=None if comm.rank else 1.0)
    fails(updater, said)


@on_ranks(1, 2)
def test_what_cannot_be_predicted_is_an_error(comm):
    updater = make_updater(comm, lambda: Divisible(L.Linear(8, 5), F.sum),
                           dataset(8), micro_batches=2)
    for given in (), (None,), (np.zeros((0, 8), 'f'),):
        with pytest.raises(ValueError, match='rank' if given else
                           'first stage of each pipeline needs arrays'):
            updater.predict(*given)
    with pytest.raises(RuntimeError, match='the output'):
        updater.predict(dataset(8)[0])


# --- updates of a partition ------------------------------------------------

@on_ranks(2)
def test_a_parameter_that_was_replaced_is_named(comm):
    model = Net()
    updater = updater_of(comm, model, [(X,)])
    if comm.rank == 0:
        with model.init_scope():
            model.l1.W = chainer.Parameter(0, (5, 4))
    fails(updater, 'parameter /l1/W was replaced after partition')


@on_ranks(2)
def test_values_on_a_rank_that_has_them_not_are_named(comm):
    model = Net()
    updater = updater_of(comm, model, [(X,)])
    name = model.plan.order[-1][0]
    if comm.rank == 0:
        parameter = model.partition.names.parameters[name]
        parameter.array = np.zeros(parameter.shape, 'f')
    fails(updater, f'parameter {name} has values on stage 0; change '
          'parameters on the rank that has them only')


class Bomb:
    """Fails in its third run, wherever that is."""

    runs, after = 0, 10 ** 9
    __name__ = 'bomb'

    def __call__(self, h):
        self.runs += 1
        if self.runs > self.after:
            raise ArithmeticError('in the middle')
        return h * 2


@pytest.mark.parametrize('schedule', ['gpipe', '1f1b', 'zero_bubble'])
@on_ranks(2, 3)
def test_an_exception_in_a_call_reaches_every_rank(comm, schedule):
    """In one stage only, in the middle of training."""
    bomb = Bomb()
    updater = updater_of(comm, Net(atomic(bomb)), [(X,)], micro_batches=4,
                         schedule=schedule)
    updater.update()
    bomb.after = bomb.runs + 2 if bomb.runs else 0
    fails(updater, 'micro-batch [0-3].*ArithmeticError: in the middle')


class Breaking(L.Linear):
    def forward(self, x):
        return Backward().apply((super().forward(x),))[0]


@on_ranks(2)
def test_an_exception_on_the_way_back_names_its_call_on_every_rank(comm):
    model = Net()
    del model.l2
    with model.init_scope():
        model.l2 = Breaking(5, 5)
    Backward.broken = False
    try:
        updater = updater_of(comm, model, [(X,)])
        updater.update()
    finally:
        Backward.broken = True
    fails(updater, 'the backward pass of Backward in /l2, on .*, '
          'micro-batch 0: ArithmeticError: on the way back')


@on_ranks(2)
@pytest.mark.parametrize(('batch', 'said'), [
    ((X[:, :3],), 'InvalidType'),
    ((X[:1],), 'a batch of 1 cannot be cut into 2 micro-batches'),
    ((X, X[:3]), r'have \[3, 8\] samples')])
def test_a_bad_batch_reaches_every_rank(comm, batch, said):
    updater = updater_of(comm, Net(), [(X,), batch])
    updater.update()
    fails(updater, said)


@on_ranks(2)
def test_calls_that_depend_on_the_rank_later_are_told(comm):
    kind = {'now': F.relu}
    updater = updater_of(comm, Net(lambda h: kind['now'](h)), [(X,)])
    updater.update()
    if comm.rank == 1:
        kind['now'] = F.sigmoid
    fails(updater, 'must not depend on the rank')


@on_ranks(2)
def test_a_warning_that_is_an_error_is_one_on_all_ranks(comm):
    updater = updater_of(comm, Net(), [(X,)] * 3 + [(X[:6],)])
    for _ in range(3):
        updater.update()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fails(updater, 'UserWarning: 2 of 2 micro-batches have shapes')


#: In a module, where no pass puts it back.
COUNT = itertools.count()


@on_ranks(2)
def test_a_model_that_calls_otherwise_each_time_is_told(comm):
    def counting(h):
        return (F.relu if next(COUNT) % 2 else F.sigmoid)(h)
    updater = updater_of(comm, Net(), [(X,)])
    updater.get_optimizer('main').target.between = counting
    fails(updater, 'makes other calls each time, for the same inputs')


@on_ranks(2)
def test_a_value_of_an_earlier_batch_is_refused(comm):
    kept = []

    def remembering(h):
        kept.append(h)
        return h + kept[max(len(kept) - 2, 0)]
    with pytest.raises((ValueError, RuntimeError),
                       match='earlier (batch|micro-batch)'):
        updater_of(comm, Net(remembering), [(X,)]).update()
