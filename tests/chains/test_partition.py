"""A raise on one rank while a model is cut is a raise on all of them."""
import contextlib
import copy
import dataclasses
import pickle
from unittest import mock

from chainer_fp8pipe import atomic, partition
from chainer_fp8pipe.chains import (
    adapter,
    deferred,
    partitioned,
    placement,
    program,
    recorder,
)
from chainer_fp8pipe.chains import partition as module
from chainer_fp8pipe.chains.placeholder import PlaceholderError
from chainer_fp8pipe.training.extensions import save_whole_model

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from mpi4py import MPI

from tests.models.judge import counted_times, plan_of, updater_of
from tests.ranks import on_ranks


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        numpy.random.seed(0)
        with self.init_scope():
            self.a, self.norm = L.Linear(4, 5), L.BatchNormalization(5)
            self.b, self.late = L.Linear(None, 3), L.Linear(None, 3)
            self.scale = chainer.Parameter(1.)
        self.add_persistent('kept', numpy.zeros(3, 'f'))
        self.drawing = numpy.random.RandomState(0)

    def forward(self, x, t):
        if self.scale.array is None:
            self.scale.initialize((5,))
        h = self.norm(self.a(x))
        for _ in range(len(x) % 4):     # other calls in a short batch
            h = F.relu(h)
        return F.softmax_cross_entropy(self.b(F.scale(h, self.scale)), t)


def batch_of(samples=8):
    return numpy.ones((samples, 4), 'f'), numpy.zeros(samples, 'i')


class Unlucky(Exception):
    """No exception that a message could be made of by its class alone."""

    def __init__(self, one, other):
        super().__init__(one, other)

    def __reduce__(self):
        raise TypeError('cannot be pickled')


def fail(*_, **__):
    raise Unlucky('no', 'luck')


@contextlib.contextmanager
def failing(comm, rank, owner, name):
    """A block in which something fails on one rank."""
    with mock.patch.object(owner, name, fail) if (
            comm.rank == rank) else contextlib.nullcontext():
        yield


#: What is called between two messages of partition(), and the rank on which
#: it fails.
PLACES = [(owner, name, rank) for owner, name, ranks in (
    (module, '_problem', (0, 1)),
    (module, 'parse_bytes', (0, 1)), (module, 'Names', (0, 1)),
    (recorder, 'Program', (0, 1)), (recorder.Recorder, 'record', (0, 1)),
    (module, 'generators_of', (0, 1)),
    (module, 'Recorder', (0, 1)), (recorder, '_Recording', (0, 1)),
    (module, 'check_result', (0, 1)),
    (program.Program, 'description', (0, 1)),
    (module, 'search', (0,)), (module, 'order_of', (0,)),
    (module, 'parameters_of', (0,)), (placement, 'Layout', (0, 1)),
    (module, 'Partition', (0, 1)),
    (placement, 'take_away', (0, 1)),
    (placement, '_write', (0, 1)),
    (deferred, 'place_array', (0, 1)))
    for rank in ranks]


@on_ranks(2)
def test_a_raise_between_two_messages_is_one_on_all_ranks(comm):
    for owner, name, rank in PLACES:
        with counted_times(), failing(comm, rank, owner, name), \
                pytest.raises(ValueError, match='Unlucky'):
            partition(Net(), batch_of(2), comm)


#: The same for a step with a micro-batch of a new form.
STEPS = [(owner, name, rank) for owner, name in (
    (placement.Placement, 'check'), (adapter.ChainAdapter, '_record'),
    (partitioned.State, 'note'), (recorder.Recorder, 'record'),
    (placement, 'Layout'), (adapter, 'check_result'),
    (program.Program, 'settle'))
    for rank in (0, 1)]


@on_ranks(2)
def test_a_raise_while_it_is_recorded_is_one_on_all_ranks(comm):
    updater = updater_of(comm, Net(), [
        batch_of(8), *(batch_of(10 + 2 * number) for number in range(
            len(STEPS)))])
    updater.update()
    for owner, name, rank in STEPS:
        with failing(comm, rank, owner, name), \
                pytest.raises((ValueError, RuntimeError), match='luck'):
            updater.update()


def test_a_whole_model_is_copied_and_pickled_with_what_it_has_kept():
    updater = updater_of(MPI.COMM_SELF, L.Classifier(L.Linear(4, 3)), [
        (numpy.ones((2, 4), 'f'), numpy.zeros(2, 'i'))])
    updater.update()
    model = updater.get_optimizer('main').target
    for found in (copy.copy(model), copy.deepcopy(model), model.copy(),
                  model.copy('copy'),
                  pickle.loads(pickle.dumps(model))):
        assert type(found) is L.Classifier
        assert (found.predictor.W.array == model.predictor.W.array).all()


@on_ranks(2)
def test_a_part_is_not_saved_as_the_model(comm, tmp_path):
    """By any serializer; what loads takes its own."""
    model = partition(Net(), batch_of(2), comm)
    optimizer = chainer.optimizers.Adam().setup(model)
    for save in (chainer.serializers.save_npz, chainer.serializers.save_hdf5,
                 lambda _, one: chainer.serializers.DictionarySerializer()[
                     'model'].save(one)):
        for one in model, chainer.Chain(inside=model), optimizer:
            with pytest.raises(RuntimeError, match='save_whole_model'):
                save(str(tmp_path / f'model{comm.rank}'), one)
    for copied in copy.deepcopy, pickle.dumps:
        with pytest.raises(PlaceholderError, match='save_whole_model'):
            copied(model)
    whole = comm.bcast(str(tmp_path / 'whole.npz'))
    save_whole_model(whole, model, comm)
    before = {name: parameter.array.copy()
              for name, parameter in model.namedparams()
              if parameter.array is not None}
    for name in before:
        dict(model.namedparams())[name].array[...] = 0
    chainer.serializers.load_npz(whole, model)
    for name, parameter in model.namedparams():
        if name in before:
            numpy.testing.assert_array_equal(parameter.array, before[name])


class Two(chainer.Chain):
    def __init__(self):
        super().__init__(a=L.Linear(100, 100), b=L.Linear(100, 100))

    def forward(self, x):
        return F.mean(self.b(self.a(x)) ** 2)


def test_what_contradicts_a_plan_is_an_error(tmp_path):
    """Numbers may be NumPy's."""
    x, path = numpy.ones((4, 100), 'f'), str(tmp_path / 'plan.json')
    plan = partition(Two(), x, MPI.COMM_SELF, micro_batches=numpy.int64(2),
                     chunks=numpy.int32(1)).plan
    plan.save(path)
    for given, said in (
            ({'micro_batches': 8}, 'micro_batches is 8, and the plan is for '),
            ({'schedule': 'gpipe'}, "'gpipe', and the plan is for '1f1b'"),
            ({'chunks': 2, 'schedule': 'interleaved'}, 'the plan is for'),
            ({'recompute': True}, 'is .True,., and the plan is for .False'),
            ({'memory': '16.1 MB'}, 'needs 16.* a cut, without plan='),
            ({'micro_batches': 0}, 'micro_batches')):
        with pytest.raises(ValueError, match=said):
            partition(Two(), x, MPI.COMM_SELF, plan=plan, **given)
    found = partition(
        Two(), x, MPI.COMM_SELF, plan=path, micro_batches=numpy.int64(2),
        schedule='1f1b', chunks=1, recompute=False, memory='17 MB').plan
    assert found.memory == pytest.approx(plan.memory, rel=.01)
    assert dataclasses.replace(
        found, seconds=plan.seconds, memory=plan.memory) == plan


@on_ranks(2)
def test_an_edited_plan_is_checked(comm):
    """Its figures are found anew; what it cannot mean is an error."""
    x = numpy.ones((4, 100), 'f')
    plan = dataclasses.asdict(partition(Two(), x, comm, memory='1 GB').plan)
    edited = {**plan, 'memory': [1, 1], 'seconds': [], 'crossing': []}
    found = partition(Two(), x, comm, plan=edited).plan
    assert found.memory == pytest.approx(plan['memory'], rel=.01)
    assert found.crossing == plan['crossing']
    order = [['/a/W', '/a/b'], ['/b/W', '/b/b']]
    for wrong, said in (
            ({'cuts': [[0, 0]]}, "plan's chunk 0 has no calls; move its cut"),
            ({'cuts': [[1, 9]]}, "plan's chunk 1 has no calls; move its cut"),
            ({'order': [*order, ['/a/b']]}, 'the order has /a/b 2 times'),
            ({'order': [*order, ['/c/W']]}, 'knows a parameter /c/W, which')):
        for memory in None, '1 GB':
            with pytest.raises(ValueError, match=said):
                partition(Two(), x, comm, plan={**plan, **wrong},
                          memory=memory)


class Looks(chainer.Chain):
    """Most of it is in a link that looks at data."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.most, self.c = Most(), L.Linear(4, 3)

    def forward(self, x, t):
        return F.softmax_cross_entropy(self.c(self.most(x)), t)


class Most(chainer.Chain):
    def __init__(self):
        super().__init__(a=L.Linear(4, 4), b=L.Linear(4, 4))

    def forward(self, x):
        h = self.a(x)
        return self.b(h) * (2. if float(h.array.max()) > 0 else 1.)


class Words(chainer.Chain):
    """A function gives text, which a later one reads."""

    def __init__(self):
        super().__init__(a=L.Linear(4, 4), b=L.Linear(4, 3))

    def forward(self, x, t):
        words = atomic(lambda h: (h.array > 0).astype('U5'))(self.a(x))
        h = atomic(lambda h: F.relu(h))(self.a(x))
        y = self.b(h)
        return F.softmax_cross_entropy(atomic(
            lambda y, words: y * (words == 'True').all())(y, words), t)


#: Of models on so many ranks; each rank's message is the same.
UNCUT = {
    'one link': (4, Looks, r'parts at most, but 4 are asked for; .*; link '
                 r'/most is not divided: .*\.py:\d+: __float__ needs the '),
    'a class': (2, lambda: Words, "takes a chainer.Link, not the class Words"),
    'text': (2, Words, r'\(<lambda> in /\) gives <U5, which cannot be sent')}


@on_ranks(4)
def test_a_model_that_cannot_be_cut_says_why(comm):
    batch = numpy.ones((4, 4), 'f'), numpy.zeros(4, 'i')
    for stages, make, said in UNCUT.values():
        plan = plan_of([['/a/W', '/a/b'], ['/b/W', '/b/b']], '/b/W') if (
            make is Words) else None
        with pytest.raises((ValueError, TypeError), match=said):
            partition(make(), batch, comm.Split(comm.rank // stages),
                      plan=plan)
    for example, said in (None, 'a batch holds a NoneType, not an array'), (
            numpy.ones((0, 100), 'f'), r'have \[0\] samples; .* 1 or more'):
        with pytest.raises(ValueError, match=said):
            partition(Two(), example, comm)
    last = str(partition(Looks(), batch, MPI.COMM_SELF)).splitlines()[-1]
    assert 'link /most is not divided: ' in last


class Remembers(chainer.Chain):
    def __init__(self):
        super().__init__()
        numpy.random.seed(0)
        with self.init_scope():
            self.a, self.l, self.b = (
                L.Linear(4, 4), L.LSTM(4, 4), L.Linear(4, 3))

    def forward(self, x, t):
        h = self.l(self.a(x))
        if len(x) == 3:
            float(self.l.h.array.sum())
        return F.softmax_cross_entropy(self.b(h), t)


@on_ranks(2)
def test_state_is_read_where_it_was_made(comm):
    """Also if the model is cut right behind; reading it has a clear error."""
    plan = plan_of([
        ['/a/W', '/a/b'], ['/l/upward/W', '/l/upward/b'], ['/b/W', '/b/b'],
        ['/l/lateral/W']], '/b/W')
    found = []
    for ranks, cut in (comm, plan), (MPI.COMM_SELF, None):
        updater = updater_of(ranks, Remembers(), [batch_of()] * 3 + [
            batch_of(6)], plan=cut)
        for _ in range(3):
            updater.update()
        with pytest.raises(ValueError, match='atomic'):
            updater.update()
        updater.update()        # goes on from the last good batch
        found.append({name: one.array.copy() for name, one in
                      updater.get_optimizer('main').target.namedparams()})
    for name, array in found[0].items():
        numpy.testing.assert_allclose(array, found[1][name], rtol=1e-5)


class Keeping(chainer.Chain):
    """Adds something of the batch before, which is there from the second."""

    def __init__(self, kept):
        super().__init__()
        self.before, self.kept, self.ema = None, kept, 0
        numpy.random.seed(0)
        with self.init_scope():
            self.a, self.b = L.Linear(4, 4), L.Linear(4, 1)

    def forward(self, x):
        h = self.a(x)
        kept = self.kept(self, x, h)
        if self.before is not None:
            h += sum(self.before) if isinstance(
                self.before, list) else self.before
        self.before = kept
        return F.mean(self.b(h) ** 2)


@on_ranks(2)
def test_a_number_that_is_none_is_the_same_on_all_ranks(comm):
    updater = updater_of(comm, Keeping(
        lambda net, x, h: (h * float('nan')).array), [
            (numpy.ones((6, 4), 'f'),)])
    updater.update()
    updater.update()


def _ema(net, x, h):
    net.ema = .9 * net.ema + .1 * h.array.mean(axis=0)
    return net.ema


@on_ranks(2)
def test_samples_go_on_from_what_was_kept_of_their_places(comm):
    """Raw arrays, copies, functions of these and computed ones."""
    batches = [(numpy.random.RandomState(seed).randn(6, 4).astype('f'),)
               for seed in range(3)]
    for kept in (lambda net, x, h: x, lambda net, x, h: [x * 2, x],
                 lambda net, x, h: x.copy(), lambda net, x, h: F.tanh(x),
                 lambda net, x, h: h.array):
        plain, model = Keeping(kept), Keeping(kept)
        reference = chainer.optimizers.SGD(.1).setup(plain)
        updater = updater_of(comm, model, batches)
        for batch in batches:
            reference.update(plain, *batch)
            updater.update()
        for name, one in model.namedparams():
            numpy.testing.assert_allclose(
                one.array, dict(plain.namedparams())[name].array, 1e-4, 1e-6)
    for samples in 6, 8:        # of which the half is the mean's length
        updater = updater_of(comm, Keeping(_ema), [
            (numpy.ones((samples, 4), 'f'),)])
        with pytest.raises(ValueError, match="link / keeps 'before'.*all "
                           'samples together.*micro_batches=1'):
            updater.update()
    updater = updater_of(comm, Keeping(lambda net, x, h: F.mean(
        chainer.as_variable(x), 0)), batches)
    with pytest.raises(ValueError, match='an earlier micro-batch.*one process '
                       'has that of the batch before.*micro_batches=1'):
        updater.update()
    with pytest.raises(ValueError, match="(?s)'before'.*as forward takes 3 "
                       'samples only.*micro_batches=1'):
        updater_of(comm, Keeping(lambda net, x, h: _ema(net, x, h.reshape(
            3, 4))), [(numpy.ones((6, 4), 'f'),)])

    def own(net, x, h):
        net.y = h.reshape(3, 4)     # which nobody reads
    updater = updater_of(comm, Keeping(own), batches)
    for _ in batches:
        updater.update()


class Counts(chainer.Chain):
    """How often each label came, as many as a micro-batch has samples.

    And how many batches, in a number, a list, and one of the module's.
    """

    def __init__(self):
        super().__init__(a=L.Linear(4, 4), b=L.Linear(4, 3))
        self.counts, self.samples = numpy.zeros(3, 'i'), 0
        self.batches, self.steps = 0, []
        self.add_persistent('saved', 0)

    def forward(self, x, t):
        global before
        self.counts = self.counts + numpy.bincount(
            t, minlength=3).astype('i')
        self.samples += len(x)
        self.batches += 1
        self.saved += 1
        self.steps.append(self.batches)
        before += 1
        chainer.report({'b': F.sum(self.a.b)}, self.a)  # as the parameter
        return self.batches * self.steps[-1] * F.softmax_cross_entropy(
            self.b(self.a(x)), t)


before = 0


@on_ranks(2)
def test_samples_are_counted_in_micro_batches_and_batches_once(comm):
    model, labels = Counts(), numpy.array([0, 1, 0, 2, 0, 1], 'i')
    was = before
    updater = updater_of(comm, model, [(numpy.ones((6, 4), 'f'), labels)])
    assert before == was        # whatever example was recorded
    for number in 1, 2, 4:
        updater.update()
        assert model.counts.tolist() == [3 * model.batches, 2 * model.batches,
                                         model.batches]
        assert model.samples == 6 * model.batches
        assert model.saved == model.batches == number
        assert model.steps == [*range(1, number + 1)]
        if number == 2:         # evaluation counts, as in one process
            updater.evaluate(numpy.ones((6, 4), 'f'), labels)


class Rows(chainer.Chain):
    """A state of each sample's steps, in rows."""

    def __init__(self):
        super().__init__(a=L.Linear(2, 4), b=L.Linear(4, 1))
        self.h = 0

    def forward(self, x):
        self.h = F.tanh(self.a(x.reshape(-1, 2)) + self.h)
        found, self.h = self.h, self.h.array
        return F.mean(self.b(found) ** 2)


@on_ranks(2)
def test_a_state_of_several_rows_a_sample_goes_on(comm):
    updater = updater_of(comm, Rows(), [(numpy.ones((6, 5, 2), 'f'),)])
    for _ in range(3):
        updater.update()


class Sizeless(chainer.Chain):
    def __init__(self):
        super().__init__(a=L.Linear(None, 6), b=L.Linear(
            None, 5, initialW=chainer.initializers.Uniform(.1)),
            c=L.Linear(5, 3))

    def forward(self, x):
        return F.sum(self.c(F.relu(self.b(F.relu(self.a(x))))) ** 2)


@on_ranks(2, 3)
def test_numpys_generator_is_where_it_is_in_one_process(comm):
    x = numpy.ones((4, 2), 'f4')
    numpy.random.seed(3)
    Sizeless()(x)
    expected = numpy.random.rand()
    numpy.random.seed(3)
    partition(Sizeless(), x, comm)
    assert comm.allgather(numpy.random.rand()) == [expected] * comm.size


class Renormalised(chainer.Chain):
    def __init__(self):
        super().__init__(a=L.Linear(2, 4), bn=L.BatchRenormalization(4),
                         b=L.Linear(4, 3))

    def forward(self, x):
        return F.mean(self.b(self.bn(self.a(x))) ** 2)


@on_ranks(2)
def test_what_moves_on_with_every_pass_is_not_recomputed(comm):
    x = numpy.random.RandomState(0).rand(4, 2).astype('f4')
    plan = partition(Renormalised(), x, comm, memory='1 GB').plan
    assert not any(plan.recompute)
    for wrong in {'recompute': True}, {'plan': {
            **dataclasses.asdict(plan), 'recompute': (True, True)}}:
        with pytest.raises(ValueError, match='pass recompute=False'):
            partition(Renormalised(), x, comm, **wrong)
