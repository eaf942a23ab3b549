"""Whatever is wrong with a partition is a clear error on every rank."""
import contextlib
import itertools
import json
import sys
import warnings

from chainer_fp8pipe import (
    PipelineUpdater,
    atomic,
    deferred,
    partition,
)
from chainer_fp8pipe.planning.cuts import DoesNotFit

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from mpi4py import MPI

from tests.models import MODELS
from tests.ranks import on_ranks
from tests.training.updaters.partitions import (
    Batches,
    as_it_is,
    batch_of,
    make,
    updater_of,
)

X = numpy.random.RandomState(0).randn(8, 4).astype('f')


class Net(chainer.Chain):
    """Calls a function between its layers."""

    def __init__(self, between=F.relu, width=5):
        super().__init__()
        self.between = between
        with self.init_scope():
            self.l1, self.l2 = L.Linear(4, width), L.Linear(width, width)
            self.l3 = L.Linear(width, 1)

    def forward(self, x):
        return F.sum(self.l3(F.tanh(self.l2(self.between(self.l1(x))))))


def cut(comm, model=None, **options):
    model = Net() if model is None else model
    return partition(model, (X[:4],), comm, **{'micro_batches': 2,
                                               **options})


def refused(comm, match, error=ValueError, model=None, **options):
    with pytest.raises(error, match=match):
        cut(comm, model, **options)
    cut(comm)               # and nothing is left behind


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


@on_ranks(2)
def test_ways_back_in_forward_are_refused(comm):
    """They would end where the stage does."""
    refused(comm, r'bad_input.py:\d+: unchain_backward\(\) in forward .* '
            r'chainer.Variable\(x.array\)', model=Net(unchained))
    refused(comm, r'bad_input.py:\d+: a gradient needs .*atomic',
            model=Net(gone_back))


@on_ranks(1, 2)
def test_a_look_in_the_models_forward_names_the_line_and_atomic(comm):
    line = looking.__code__.co_firstlineno + 1
    refused(comm, fr'test_partition_bad_input.py:{line}: .*LinearFunction '
            r'in /l1.*chainer_fp8pipe.atomic', model=Net(looking))
    cut(comm, Net(atomic(looking)))


@pytest.mark.parametrize('name', ['halting', 'actor_critic',
                                  'moving_average'])
@on_ranks(2)
def test_models_of_the_collection_that_look_are_refused(comm, name):
    case = MODELS[name]
    with pytest.raises(ValueError, match=r'tests/models/vectors.py:\d+: '
                       r'.*chainer_fp8pipe\.atomic'):
        partition(make(name), batch_of(name, samples=4), comm)
    assert case.reads


@on_ranks(2, 3)
def test_ranks_that_build_other_models_are_told(comm):
    refused(comm, r'parameter /\S+ is float32 \(5, .*on rank 0 but float32 '
            r'\(6, .*Build the same model on all ranks',
            model=Net(width=5 + (comm.rank == 1)))
    refused(comm, 'must not depend on the rank',
            model=Net(F.relu if comm.rank == 0 else F.sigmoid))


@on_ranks(2)
def test_examples_of_other_shapes_are_told(comm):
    with pytest.raises(ValueError, match='examples of the same shapes'):
        partition(Net(), (X[:4 + comm.rank],), comm)


@on_ranks(2)
def test_a_model_that_fails_on_one_rank_is_named(comm):
    def fails(h):
        if comm.rank == 1:
            raise KeyError('only here')
        return h
    refused(comm, "rank 1: KeyError: 'only here'", model=Net(fails))


@on_ranks(1, 2)
def test_what_is_no_model_is_refused(comm):
    from chainer_fp8pipe import Divisible
    refused(comm, 'takes a chainer.Link, not function', model=looking)
    refused(comm, 'a Divisible is cut by its stage',
            model=Divisible(L.Linear(4, 4)))


@on_ranks(1, 2)
def test_a_model_is_cut_once(comm):
    model = cut(comm)
    refused(comm, 'was cut already; build it anew', model=model)


@on_ranks(2)
def test_options_that_are_none_are_named(comm):
    refused(comm, "'much' is no size; write it as in", memory='much')
    refused(comm, "recompute must be 'auto', True or False, not 'often'",
            recompute='often')
    refused(comm, 'optimizer_arrays must be a number', optimizer_arrays=-1)
    refused(comm, "not '2'", optimizer_arrays='2')
    refused(comm, 'schedule.*2f2b', schedule='2f2b')
    refused(comm, "micro_batches is '4'; it must be a whole number",
            micro_batches='4')
    refused(comm, "'1f1b' has one chunk per rank, not 2", chunks=2)


@on_ranks(2)
def test_an_option_of_one_rank_alone_fails_on_all(comm):
    refused(comm, "'much' is no size", memory='much' if comm.rank else None)


@pytest.mark.parametrize(('name', 'here', 'there'), [
    ('micro_batches', 2, 4),
    ('schedule', "'1f1b'", 'gpipe'), ('chunks', 1, 2),
    ('recompute', 'True', 'auto'), ('memory', '1000000000.0', None),
    ('optimizer_arrays', 1, 2)])
@on_ranks(2)
def test_ranks_that_are_given_something_else_are_told(comm, name, here,
                                                      there):
    mine = {'schedule': '1f1b', 'recompute': True,
            'memory': '1 GB'}.get(name, here)
    options = {'schedule': 'interleaved', 'chunks': 1,
               name: there if comm.rank else mine}
    refused(comm, fr'{name} is {here} on rank 0 but {there!r} on rank 1\. '
            r'Pass the same to partition\(\) on all ranks', **options)


@on_ranks(2)
def test_a_plan_that_the_first_rank_has_not_is_refused(comm):
    plan = cut(comm).plan
    refused(comm, 'rank 1: a plan is given on this rank, and none on rank 0',
            plan=plan if comm.rank else None)


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
        cut(comm)
        assert sys.excepthook is not sys.__excepthook__
    finally:
        sys.excepthook = before


@on_ranks(2)
def test_a_model_that_does_not_fit_is_an_error_on_all_ranks(comm):
    refused(comm, r'no cut into 2 stages fits into 1 kB per rank.*A rank '
            'takes 16 MB for code and buffers', DoesNotFit, memory='1 kB')


@on_ranks(3)
def test_too_many_ranks_are_an_error_on_all_of_them(comm):
    class Small(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.only = L.Linear(4, 1)

        def forward(self, x):
            return F.sum(self.only(x))
    refused(comm, 'into 2 parts at most, but 3 are asked for; use fewer '
            'ranks', model=Small())


@on_ranks(2)
def test_a_plan_that_is_not_this_models_is_refused(comm, tmp_path):
    good = cut(comm).plan.as_dict()
    comm.Barrier()
    refused(comm, 'is no plan', plan={})
    refused(comm, r'plan is for 1 stages, and there are 2', plan=dict(
        good, stages=1))
    order = [['/x/W'], *good['order']]
    refused(comm, 'knows a parameter /x/W, which the model has not',
            plan=dict(good, order=order))
    refused(comm, 'before /nowhere', plan=dict(
        good, cuts=[{'before': '/nowhere', 'calls_later': 0}]))
    path = tmp_path / 'plan.json'
    if comm.rank == 0:
        path.write_text(json.dumps(good)[:-30])
    comm.Barrier()
    refused(comm, 'plan.json is no JSON', plan=str(path))
    refused(comm, 'no_such.json', FileNotFoundError,
            plan=str(tmp_path / 'no_such.json'))


@on_ranks(2)
def test_the_model_itself_is_not_called(comm):
    model = cut(comm)
    with pytest.raises(RuntimeError, match='is on several ranks.*update'):
        model(X)


@on_ranks(2)
def test_a_partition_has_one_optimizer(comm):
    model = cut(comm)
    for number in range(2):
        optimizer = chainer.optimizers.SGD().setup(model)
        if number:
            with pytest.raises(ValueError, match='another optimizer trains'):
                PipelineUpdater(Batches((X,)), optimizer, comm)
        else:
            PipelineUpdater(Batches((X,)), optimizer, comm)


@on_ranks(2)
def test_the_ranks_are_those_of_the_cut(comm):
    optimizer = chainer.optimizers.SGD().setup(cut(comm))
    for other in (comm.Dup(), MPI.COMM_SELF):
        with pytest.raises(ValueError, match='cut for other ranks; give '
                           'PipelineUpdater the comm that partition'):
            PipelineUpdater(Batches((X,)), optimizer, other)


@on_ranks(2)
def test_a_plain_chain_is_told_of_partition(comm):
    optimizer = chainer.optimizers.SGD().setup(Net())
    with pytest.raises(ValueError, match='partition\\(model, example, comm'):
        PipelineUpdater(Batches((X,)), optimizer, comm)


def failing(updater, match):
    with pytest.raises((RuntimeError, ValueError), match=match):
        updater.update()


@on_ranks(2)
def test_a_parameter_that_was_replaced_is_named(comm):
    model = Net()
    updater = updater_of(comm, model, [(X,)])
    if comm.rank == 0:
        with model.init_scope():
            model.l1.W = chainer.Parameter(0, (5, 4))
    failing(updater, 'parameter /l1/W was replaced after partition')


@on_ranks(2)
def test_values_on_a_rank_that_has_them_not_are_named(comm):
    model = Net()
    updater = updater_of(comm, model, [(X,)])
    name = model.plan.order[-1][0]
    if comm.rank == 0:
        model.partition.names.parameters[name].array = numpy.zeros(
            model.partition.names.parameters[name].shape, 'f')
    failing(updater, f'parameter {name} has values on stage 0; change '
            'parameters on the rank that has them only')


class Bomb:
    """Fails in its third run, wherever that is."""

    runs = 0

    def __call__(self, h):
        self.runs += 1
        if self.runs > self.after:
            raise ArithmeticError('in the middle')
        return h * 2

    after = 10 ** 9


@pytest.mark.parametrize('schedule', ['gpipe', '1f1b', 'zero_bubble'])
@on_ranks(2, 3)
def test_an_exception_in_a_call_reaches_every_rank(comm, schedule):
    """In one stage only, in the middle of training."""
    bomb = Bomb()
    bomb.__name__ = 'bomb'
    model = Net(atomic(bomb))
    updater = updater_of(comm, model, [(X,)], micro_batches=4,
                         schedule=schedule)
    updater.update()
    bomb.after = bomb.runs + 2 if bomb.runs else 0
    failing(updater, 'micro-batch [0-3].*ArithmeticError: in the middle')


class Backward(chainer.FunctionNode):
    broken = False

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, gradients):
        if Backward.broken:
            raise ArithmeticError('on the way back')
        return gradients


class Breaking(L.Linear):
    def forward(self, x):
        return Backward().apply((super().forward(x),))[0]


@on_ranks(2)
def test_an_exception_on_the_way_back_names_its_call_on_every_rank(comm):
    model = Net()
    del model.l2
    with model.init_scope():
        model.l2 = Breaking(5, 5)
    updater = updater_of(comm, model, [(X,)])
    updater.update()
    Backward.broken = True
    try:
        failing(updater, 'the backward pass of Backward in /l2, on .*, '
                'micro-batch 0: ArithmeticError: on the way back')
    finally:
        Backward.broken = False


@on_ranks(2)
def test_a_bad_batch_reaches_every_rank(comm):
    updater = updater_of(comm, Net(), [(X,), (X[:, :3],)])
    updater.update()
    failing(updater, 'InvalidType')
    updater = updater_of(comm, Net(), [(X,), (X[:1],)])
    updater.update()
    failing(updater, 'a batch of 1 cannot be cut into 2 micro-batches')
    updater = updater_of(comm, Net(), [(X,), (X, X[:3])])
    updater.update()
    failing(updater, r'have \[3, 8\] samples')


@on_ranks(2)
def test_calls_that_depend_on_the_rank_later_are_told(comm):
    kind = {'now': F.relu}
    updater = updater_of(comm, Net(lambda h: kind['now'](h)), [(X,)])
    updater.update()
    if comm.rank == 1:
        kind['now'] = F.sigmoid
    failing(updater, 'must not depend on the rank')


@on_ranks(2)
def test_a_warning_that_is_an_error_is_one_on_all_ranks(comm):
    updater = updater_of(comm, Net(), [(X,)] * 3 + [(X[:6],)])
    for _ in range(3):
        updater.update()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        failing(updater, 'UserWarning: 2 of 2 micro-batches have shapes')


#: In a module, where no pass puts it back.
COUNT = itertools.count()


@on_ranks(2)
def test_a_model_that_calls_otherwise_each_time_is_told(comm):
    def counting(h):
        return (F.relu if next(COUNT) % 2 else F.sigmoid)(h)
    updater = updater_of(comm, Net(), [(X,)])
    updater.get_optimizer('main').target.between = counting
    failing(updater, 'makes other calls each time, for the same inputs')


@on_ranks(2)
def test_a_model_must_return_its_loss(comm):
    for made in (lambda y: numpy.zeros(()),
                 lambda y: y.reshape(1, 1) * numpy.ones((2, 1), 'f')):
        with pytest.raises(ValueError, match='must return its loss, a scalar'):
            cut(comm, Returning(Net(), made))


class Returning(chainer.Chain):
    """Makes something else of another model's loss."""

    def __init__(self, model, made):
        super().__init__()
        self.made = made
        with self.init_scope():
            self.model = model

    def forward(self, x):
        return self.made(self.model(x))


@on_ranks(2)
def test_a_value_of_an_earlier_batch_is_refused(comm):
    kept = []

    def remembering(h):
        kept.append(h)
        return h + kept[max(len(kept) - 2, 0)]
    with pytest.raises((ValueError, RuntimeError),
                       match='earlier (batch|micro-batch)'):
        updater_of(comm, Net(remembering), [(X,)]).update()


@on_ranks(2)
def test_options_of_the_updater_must_be_the_same(comm):
    optimizer = chainer.optimizers.SGD().setup(cut(comm))
    with pytest.raises(ValueError, match='seed'):
        PipelineUpdater(Batches((X,)), optimizer, comm, converter=as_it_is,
                        seed=comm.rank)


@pytest.mark.parametrize(('options', 'said'), [
    ({'loss_fun': F.mean_squared_error}, 'loss_fun cannot be given'),
    ({'metrics': {}}, 'metrics cannot be given'),
    ({'label_key': 'label'}, 'label_key cannot be given'),
    ({'loss_fun': F.mean_squared_error, 'label_key': 0},
     'loss_fun and label_key cannot be given')])
@on_ranks(2)
def test_what_only_a_divisible_is_trained_with_is_refused(comm, options, said):
    optimizer = chainer.optimizers.SGD().setup(cut(comm))
    with pytest.raises(ValueError, match=said):
        PipelineUpdater(Batches((X,)), optimizer, comm, **options)


@on_ranks(1, 2)
def test_arrays_by_position_and_by_name_are_not_both_taken(comm):
    updater = updater_of(comm, Net(), [(X,)])
    with pytest.raises(ValueError, match='by position, or all of them'):
        updater.evaluate(X, t=X)
