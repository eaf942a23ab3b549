"""Whatever is wrong on one rank is a clear error on every rank."""
import json

from chainer_fp8pipe import (
    Divisible,
    PipelineUpdater,
    atomic,
    partition,
)
from chainer_fp8pipe.chains.cuts import DoesNotFit

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from mpi4py import MPI

from tests.ranks import on_ranks
from tests.training.trainers import Job
from tests.training.updaters.networks import Plain, dataset
from tests.training.updaters.partitions import (
    Batches,
    as_it_is,
    updater_of,
)

X = np.random.RandomState(0).randn(8, 4).astype('f')


class Net(chainer.Chain):
    """Calls a function between its layers."""

    def __init__(self, between=F.relu, width=5, ends=1):
        super().__init__(l1=L.Linear(4, width), l2=L.Linear(width, width),
                         l3=L.Linear(width, ends))
        self.between = between

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
    'a text for an optimizer': ('optimizer must be .*, not str',
                                lambda rank: {'optimizer': 'Adam'}),
    'other optimizer': ('optimizer is .* on rank 0 but ', lambda rank: {
        'optimizer': (chainer.optimizers.SGD if rank
                      else chainer.optimizers.Adam)()}),
    'schedule': ('schedule.*2f2b', lambda rank: {'schedule': '2f2b'}),
    'micro_batches': ("micro_batches is '4'; it must be a whole number",
                      lambda rank: {'micro_batches': '4'}),
    'chunks': ("'1f1b' has one chunk per rank, not 2",
               lambda rank: {'chunks': 2}),
    **{f'other {option[0]}': differing(*option) for option in (
        ('micro_batches', 2, 4), ('schedule', '1f1b', 'gpipe'),
        ('chunks', 1, 2), ('memory', '1 GB', None, 1e9))},
    'other recompute': (
        "recompute is True on rank 0 but 'auto' on rank 1",
        lambda rank: {'recompute': 'auto' if rank else True}),
    'no plan': ('the plan: order is missing', lambda rank: {'plan': {}}),
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
    refused(comm, r'no_such.json cannot be read \(No such file',
            plan=str(tmp_path / 'no_such.json'))


@on_ranks(2)
def test_a_part_of_a_model_is_not_called(comm):
    model = cut(comm)
    with pytest.raises(RuntimeError, match='a part of this model.*update'):
        model(X)


# --- updaters --------------------------------------------------------------

#: Of a list of layers, on all ranks: what is said of values.
OPTIONS = {
    'schedule': {'gpipe, 1f1b, interleaved, zero_bubble': 'zigzag'},
    'recompute': {'must be True, False or a tuple': 'some'},
    'micro_batches': {'must be a whole number of at least 1': 2.0},
    'loss_func': {'loss_func must be a function': 'mse'},
    'loss_weight': {'loss_weight must be a function': 2},
    'metrics': {"other than 'loss'": {'loss': F.accuracy},
                'and functions': {'right': 'accuracy'}},
    'seed': {'seed must be an integer': 'one'},
}


@on_ranks(1, 2)
@pytest.mark.parametrize('option', OPTIONS)
def test_an_unknown_option_is_an_error_that_lists_the_known(comm, option):
    for said, value in OPTIONS[option].items():
        with pytest.raises(ValueError, match=said):
            Job(comm, **{option: value})


@on_ranks(2, 3)
@pytest.mark.parametrize(('option', 'values', 'said'), [
    *((option, values, f'{option} is .* on rank 0 but .* on rank ')
      for option, values in (
          ('micro_batches', (2, 3)), ('schedule', ('gpipe', '1f1b')),
          ('seed', (0, 1)), ('recompute', (True, False)))),
    ('micro_batches', (4, 0), 'ValueError: micro_batches is 0; it must be')])
def test_options_of_the_last_rank_alone_are_an_error_on_all(
        comm, option, values, said):
    last = comm.size - 1
    with pytest.raises(ValueError, match=f'{said}{last}' if said.endswith(
            ' ') else f'rank {last}: {said}'):
        Job(comm, **{option: values[comm.rank == last]})


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
    refused_by('metrics cannot be given', model, metrics={})
    refused_by('another loss_func; pass this one to partition', model,
               loss_func=F.mean_squared_error)
    PipelineUpdater(Batches((X,)), chainer.optimizers.SGD().setup(model),
                    comm)
    refused_by('another optimizer trains', model)
    refused_by(r'rank 1: ValueError: stage 1 of 2 has <Plain: layers', Plain(
        ).share(0, 2))
    refused_by('the cut of the layers is', Plain().share(
        comm.rank, 2, [4, 3] if comm.rank else [3, 4]))


# --- updates of layers -----------------------------------------------------

def fails(updater, match):
    with pytest.raises((RuntimeError, ValueError), match=match):
        updater.update()


def none(x):
    return None


def four(bad, place):
    """Layers, of which one is bad."""
    layers = [L.Linear(8, 8), F.relu, F.tanh, L.Linear(8, 5)]
    layers[place:place + (bad is none)] = [bad]
    return layers


class Broken(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 4

    def get_example(self, i):
        raise OSError('unreadable')


def on_one(prepare):
    """Does something to the optimizer of one rank alone."""
    return lambda job: prepare(job.optimizer) if job.comm.rank == 0 else None


#: What is said of an update, layers, options, and what is done before.
LAYERS = {
    **{f'none {place}': (
        fr'layer {place} \(none\), micro-batch 0: TypeError: it returned None',
        lambda place=place: four(none, place), {}) for place in range(4)},
    'shapes': (r'layer 1 \(Linear\), micro-batch 0: .*InvalidType', lambda: [
        L.Linear(8, 7), L.Linear(6, 4), F.relu, L.Linear(4, 5)], {}),
    'no scalar': ('the loss, micro-batch 0: .*must return a scalar',
                  lambda: four(F.relu, 1), {'loss_func': lambda y, t: y}),
    # Losses of (n, 1) outputs and (n,) targets would be of (n, n).
    'broadcast': ('the loss.*InvalidType', lambda: [
        L.Linear(8, 4), F.relu, F.tanh, L.Linear(4, 1)],
        {'loss_func': lambda y, t: F.mean_squared_error(
            y, t.astype('f'))}),
    'small batch': ('a batch of 8 cannot be cut into 9 micro-batches; lower',
                    lambda: four(F.relu, 1), {'micro_batches': 9}),
    **{said: (said, lambda: four(F.relu, 1), {
        'iterator': lambda data=data: chainer.iterators.SerialIterator(
            data, 4)}) for said, data in (
        ('OSError: unreadable', Broken()),
        ('a tuple of inputs and, last, the target; .* one of 1 arrays',
         dataset(8)[0]))},
    'clipping': ('the gradient clipping is', lambda: four(F.relu, 1), {},
                 on_one(lambda optimizer: optimizer.add_hook(
                     chainer.optimizer_hooks.GradientClipping(1.0)))),
    'loss scaling': ('dynamic loss scaling is', lambda: four(F.relu, 1), {},
                     lambda job: job.optimizer.loss_scaling(
                         scale=None if job.comm.rank else 1.0)),
}


@on_ranks(1, 2, 4)
@pytest.mark.parametrize('wrong', LAYERS)
def test_a_failing_update_of_layers_is_an_error_on_every_rank(comm, wrong):
    match, layers, options, *prepare = LAYERS[wrong]
    if prepare and comm.size == 1:
        return                  # on one rank of several
    options = {name: value() if name == 'iterator' else value
               for name, value in options.items()}
    job = Job(comm, lambda: Divisible(*layers()), data=dataset(8),
              **{'micro_batches': 2, **options})
    for act in prepare:
        act(job)
    fails(job, match)


@on_ranks(2)
def test_the_rank_that_failed_has_its_own_exception(comm):
    job = Job(comm, loss_func=lambda y, t: y)
    with pytest.raises(RuntimeError) as caught:
        job.update()
    names = comm.allgather(type(caught.value).__name__)
    assert names == ['RemoteError', 'LayerError']
    assert comm.rank == 1 or str(caught.value).startswith('rank 1: the loss')
    with pytest.raises(ValueError, match='failed before.*the loss.*make a '
                                         'new updater'):
        job.update()
    Job(comm).update()


@on_ranks(1, 2)
def test_what_cannot_be_predicted_is_an_error(comm):
    updater = Job(comm, lambda: Divisible(L.Linear(8, 5), F.sum)).updater
    for given in (), (None,), (np.zeros((0, 8), 'f'),):
        with pytest.raises(ValueError, match='rank' if given else
                           'first stage of each pipeline needs arrays'):
            updater.predict(*given)
    with pytest.raises(RuntimeError, match='the output'):
        updater.predict(dataset(8)[0])


# --- updates of a partition ------------------------------------------------

def replaced(comm, model):
    if comm.rank == 0:
        with model.init_scope():
            model.l1.W = chainer.Parameter(0, (5, 4))


def misplaced(comm, model):
    """Values on a rank that has them not."""
    if comm.rank == 0:
        parameter = model.partition.names.parameters[model.plan.order[-1][0]]
        parameter.array = np.zeros(parameter.shape, 'f')


def other_calls(comm, model):
    model.between = F.sigmoid if comm.rank == 1 else F.relu


def nothing(comm, model):
    pass


#: What is said of an update, what is done to the model before, and the batch.
CHAINS = {
    'replaced': ('parameter /l1/W was replaced after partition', replaced),
    'misplaced': (r'parameter /l3/\w has values on stage 0; change parameters '
                  'on the rank that has them only', misplaced),
    'other calls': ('must not depend on the rank', other_calls),
    **{said: (said, nothing, batch) for said, batch in (
        ('InvalidType', (X[:, :3],)),
        ('a batch of 1 cannot be cut into 2 micro-batches', (X[:1],)),
        (r'have \[3, 8\] samples', (X, X[:3])))},
}


@pytest.mark.parametrize('wrong', CHAINS)
@on_ranks(2, 3)
def test_a_failing_update_of_a_chain_is_an_error_on_every_rank(comm, wrong):
    """In the middle of training."""
    match, spoil, *batch = CHAINS[wrong]
    model = Net()
    updater = updater_of(comm, model, [(X,), *(batch or [(X,)])])
    updater.update()
    spoil(comm, model)
    fails(updater, match)
