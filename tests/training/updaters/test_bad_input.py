"""Whatever is wrong on one rank is a clear error on every rank."""
import itertools

from chainer_fp8pipe import (
    Divisible,
    PipelineUpdater,
    atomic,
    create_communicator,
    partition,
)

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainermn.links import MultiNodeBatchNormalization
from mpi4py import MPI

from tests.models.judge import (
    Batches,
    as_it_is,
    plan_of,
    updater_of,
)
from tests.ranks import on_ranks
from tests.training.trainers import Job
from tests.training.updaters.networks import Plain, dataset

X = np.random.RandomState(0).randn(8, 4).astype('f')


class Net(chainer.Chain):
    """Calls a function between its layers, and one of its loss."""

    def __init__(self, between=F.relu, width=5, made=lambda loss: loss):
        super().__init__(l1=L.Linear(4, width), l2=L.Linear(width, width),
                         l3=L.Linear(width, 1))
        self.between, self.made = between, made

    def forward(self, x):
        return self.made(F.sum(self.l3(F.tanh(self.l2(self.between(
            self.l1(x)))))))


PLAN = plan_of([[f'/{name}/W', f'/{name}/b'] for name in ('l1', 'l2', 'l3')],
               '/l2/W')


def cut(comm, model=None, example=X[:4], **options):
    return partition(Net() if model is None else model, (example,), comm,
                     **{'micro_batches': 2, **options})


def looking(h):
    if h.array.max() > 0:           # here
        return h
    return -h


def gone_back(h):
    x = chainer.Variable(h.array)
    chainer.backward([F.sum(x ** 2)])       # back
    return h + x.grad


def with_gradient():
    net = Net(lambda h: h if net.l1.W.grad is None else -h)
    return net


def failing_on_rank_1(rank):
    def fails(h):
        if rank == 1:
            raise KeyError('only here')
        return h
    return fails


def differing(name, here, there, said=None):
    """An option that rank 1 gets otherwise."""
    return (fr'{name} is {said or here!r} on rank 0 but {there!r} on rank 1\.'
            r' Pass the same to partition\(\) on all ranks',
            lambda comm: cut(comm, **{
                'schedule': 'interleaved', 'chunks': 1,
                name: there if comm.rank else here}))


HERE = looking.__code__.co_firstlineno + 1
#: Of partition(): what is said, and what is done.
CUTS = {
    'way back in forward': (r'bad_input.py:\d+: a gradient needs .*atomic',
                            lambda comm: cut(comm, Net(gone_back))),
    'looks at values': (
        fr'test_bad_input.py:{HERE}: .*needs the value of call 2.*'
        r'chainer_fp8pipe.atomic', lambda comm: cut(comm, Net(looking))),
    'reads a gradient': (
        r'bad_input.py:\d+: forward reads the gradient .*call_for_each_param',
        lambda comm: cut(comm, with_gradient())),
    'another shape': (
        r'parameter /\S+ is float32 \(5, .*on rank 0 but float32 \(6, .*'
        'Build the same model on all ranks',
        lambda comm: cut(comm, Net(width=5 + comm.rank))),
    'other calls': (
        'must not depend on the rank',
        lambda comm: cut(comm, Net(F.sigmoid if comm.rank else F.relu))),
    'fails on one rank': (
        "rank 1: KeyError: 'only here'",
        lambda comm: cut(comm, Net(failing_on_rank_1(comm.rank)))),
    'no loss': (r'partition\(\.\.\., loss_func', lambda comm: cut(
        comm, chainer.Sequential(L.Linear(4, 4), L.Linear(4, 3)))),
    'no scalar': ('must return its loss, a scalar', lambda comm: cut(comm, Net(
        made=lambda y: y.reshape(1, 1) * np.ones((2, 1), 'f')))),
    'no variable': ('must return its loss, a scalar', lambda comm: cut(
        comm, Net(made=lambda y: np.zeros(())))),
    'no model': ('takes a chainer.Link, not function',
                 lambda comm: cut(comm, looking)),
    'layers': ('a Divisible is cut by its stage',
               lambda comm: cut(comm, Divisible(L.Linear(4, 4)))),
    'a cut one': ('was cut already; build it anew',
                  lambda comm: cut(comm, cut(comm))),
    'few calls': (
        'into 2 parts at most, but 8 are asked for; use fewer ranks',
        lambda comm: cut(comm, chainer.Sequential(L.Linear(4, 1), F.sum),
                         schedule='interleaved', chunks=4)),
    'no parameters': ('nothing to cut: no parameter has a part in its result',
                      lambda comm: cut(comm, chainer.Sequential(F.sum))),
    'memory': ("'much' is no size; write it as in",
               lambda comm: cut(comm, memory='much' if comm.rank else None)),
    'little memory': (
        r'no cut into 2 stages fits into 1 kB per rank.*16 MB are for code '
        'and buffers', lambda comm: cut(comm, memory='1 kB')),
    'recompute': ("recompute must be 'auto', True or False, not 'often'",
                  lambda comm: cut(comm, recompute='often')),
    'a text for an optimizer': ('optimizer must be .*, not str',
                                lambda comm: cut(comm, optimizer='Adam')),
    'other optimizer': ('optimizer is .* on rank 0 but ', lambda comm: cut(
        comm, optimizer=(chainer.optimizers.SGD if comm.rank
                         else chainer.optimizers.Adam)())),
    'schedule': ('schedule.*2f2b', lambda comm: cut(comm, schedule='2f2b')),
    'micro_batches': ("micro_batches is '4'; it must be a whole number",
                      lambda comm: cut(comm, micro_batches='4')),
    'chunks': ("'1f1b' has one chunk per rank, not 2",
               lambda comm: cut(comm, chunks=2)),
    **{f'other {option[0]}': differing(*option) for option in (
        ('micro_batches', 2, 4), ('schedule', '1f1b', 'gpipe'),
        ('chunks', 1, 2), ('memory', '1 GB', None, 1e9))},
    'other recompute': (
        "recompute is True on rank 0 but 'auto' on rank 1",
        lambda comm: cut(comm, recompute='auto' if comm.rank else True)),
    'other example': ('examples of the same shapes',
                      lambda comm: cut(comm, example=X[:4 + comm.rank])),
    **{f'plan: {said}': (said, lambda comm, plan=plan: cut(comm, plan=plan))
       for said, plan in (
        ('order is missing', {}),
        ('stages is 2, and the plan is for 1', {**PLAN, 'stages': 1}),
        ('knows a parameter /x/W, which the model has not',
         {**PLAN, 'order': [['/x/W'], *PLAN['order']]}),
        ('is no index in the order', {**PLAN, 'cuts': [[4, 0]]}),
        ('is no index in the order', {**PLAN, 'cuts': [[1]]}),
        ('bad_input.py: Extra data', __file__),
        ('no_such.json: No such file', 'no_such.json'))},
    'plan of one rank': (
        'rank 1: a plan is given on this rank, and none on rank 0',
        lambda comm: cut(comm, plan=PLAN if comm.rank else None)),
    'called': ('needs the value of parameter .*evaluate',
               lambda comm: cut(comm)(X)),
}


def none(x):
    return None


def four(bad=F.relu, place=1):
    """Layers, of which one is bad."""
    layers = [L.Linear(8, 8), F.relu, F.tanh, L.Linear(8, 5)]
    layers[place:place + (bad is none)] = [bad]
    return layers


class Broken(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 4

    def get_example(self, i):
        raise OSError('unreadable')


def update(comm, layers=None, before=lambda job: None, data=None, **options):
    """An update of layers; data make an iterator."""
    if data is not None:
        options['iterator'] = chainer.iterators.SerialIterator(data, 4)
    job = Job(comm, lambda: Divisible(*layers or four()), data=dataset(8),
              **{'micro_batches': 2, **options})
    before(job)
    job.update()


def clipping(job):
    if job.comm.rank == 0:
        job.optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.0))


def faster(job):
    job.optimizer.lr *= 1 + job.comm.rank


#: Of a list of layers.
LAYERS = {
    **{f'option {name}': (said, lambda comm, given={name: value}: Job(
        comm, **given)) for name, value, said in (
        ('schedule', 'zigzag', 'gpipe, 1f1b, interleaved, zero_bubble'),
        ('recompute', 'some', 'must be True, False or a tuple'),
        ('micro_batches', 2.0, 'must be a whole number of at least 1'),
        ('loss_func', 'mse', 'loss_func must be a function'),
        ('loss_weight', 2, 'loss_weight must be a function'),
        ('seed', 'one', 'seed must be an integer'))},
    **{f'other {name}': (
        f'{name} is .* on rank 0 but .* on rank 1',
        lambda comm, name=name, values=values: Job(
            comm, **{name: values[comm.rank]}))
       for name, values in (
           ('micro_batches', (2, 3)), ('schedule', ('gpipe', '1f1b')),
           ('seed', (0, 1)), ('recompute', (True, False)))},
    'option of one rank': (
        'rank 1: ValueError: micro_batches is 0; it must be',
        lambda comm: Job(comm, micro_batches=4 * (comm.rank == 0))),
    **{f'none {place}': (
        fr'layer {place} \(none\), micro-batch 0: TypeError: it returned None',
        lambda comm, place=place: update(comm, four(none, place)))
       for place in range(4)},
    'shapes': (r'layer 1 \(Linear\), micro-batch 0: .*InvalidType',
               lambda comm: update(comm, [
                   L.Linear(8, 7), L.Linear(6, 4), F.relu, L.Linear(4, 5)])),
    'no scalar': ('the loss, micro-batch 0: .*must return a scalar',
                  lambda comm: update(comm, loss_func=lambda y, t: y)),
    # Losses of (n, 1) outputs and (n,) targets would be of (n, n).
    'broadcast': ('the loss.*InvalidType', lambda comm: update(
        comm, [*four()[:3], L.Linear(8, 1)],
        loss_func=lambda y, t: F.mean_squared_error(y, t.astype('f')))),
    'small batch': ('a batch of 8 cannot be cut into 9 micro-batches; lower',
                    lambda comm: update(comm, micro_batches=9)),
    'no iterator': ('first stage need an iterator, not list',
                    lambda comm: update(comm, iterator=[1])),
    'data': ('OSError: unreadable', lambda comm: update(comm, data=Broken())),
    'no target': ('a tuple of inputs and, last, the target; .*of 1 arrays',
                  lambda comm: update(comm, data=dataset(8)[0])),
    **{f'weight {value}': (
        'the weight of a micro-batch is',
        lambda comm, value=value: update(comm, loss_weight=lambda t: value))
       for value in (-1.0, np.nan, np.inf)},
    'clipping': ('the gradient clipping is',
                 lambda comm: update(comm, before=clipping)),
    'rates': (r'is MomentumSGD with Hyper\S+lr=0.1, .* on rank 0 but .*lr=0.2',
              lambda comm: update(comm, before=faster)),
    'loss scaling': ('dynamic loss scaling is', lambda comm: update(
        comm, before=lambda job: job.optimizer.loss_scaling(
            scale=None if comm.rank else 1.0))),
}


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


def other_calls_at_last(comm, model):
    """In the second micro-batch, which is recorded while a rank would wait."""
    turns = itertools.count()
    model.between = lambda h: (
        F.sigmoid if comm.rank and next(turns) % 2 else F.relu)(h)


def other_message_at_last(comm, model):
    seen = []
    model.between = lambda h: seen.append(h) or F.relu(h)
    model.made = lambda loss: (
        loss + F.sum(seen[-1]) if comm.rank and len(seen) % 2 == 0 else loss)


def later(comm, spoil=lambda comm, model: None, batch=(X,), **options):
    """A second update of a Chain, or what is wrong after the first one."""
    model = Net()
    updater = updater_of(comm, model, [(X,), batch], **options)
    updater.update()
    spoil(comm, model)
    updater.update()


#: Of a Chain in the middle of training.
CHAINS = {
    'replaced': ('parameter /l1/W was replaced after partition',
                 lambda comm: later(comm, replaced)),
    'misplaced': (r'parameter /l3/\w has values on stage 0; change parameters '
                  'on the rank that has them only',
                  lambda comm: later(comm, misplaced)),
    'other later calls': ('must not depend on the rank',
                          lambda comm: later(comm, other_calls)),
    'other calls at last': ('call 1 of micro-batch 1 is ReLU in / .*Sigmoid',
                            lambda comm: later(comm, other_calls_at_last)),
    'another message at last': (
        'another rank has recorded other calls of this micro-batch',
        lambda comm: later(comm, other_message_at_last, plan=PLAN)),
    'other weights': (
        r'loss_weight is \[4.0, 4.0\] on rank 0 but \[5.0, 5.0\] on rank 1',
        lambda comm: later(comm, loss_weight=lambda x: len(x) + comm.rank)),
    **{said: (said, lambda comm, batch=batch: later(comm, batch=batch))
       for said, batch in (
        ('InvalidType', (X[:, :3],)),
        ('a batch of 1 cannot be cut into 2 micro-batches', (X[:1],)),
        (r'have \[3, 8\] samples', (X, X[:3])))},
}
WRONG = {**CUTS, **LAYERS, **CHAINS}


@pytest.mark.parametrize('wrong', WRONG)
@on_ranks(2, timeout=60)
def test_what_is_wrong_is_an_error_on_all_ranks(comm, wrong):
    said, act = WRONG[wrong]
    with pytest.raises((ValueError, RuntimeError), match=said):
        act(comm)
    if wrong in CUTS:
        cut(comm, Net(atomic(looking)))     # and nothing is left behind


@on_ranks(2)
def test_what_an_updater_cannot_train_is_refused(comm):
    def refused_by(match, model, ranks=comm, **options):
        with pytest.raises(ValueError, match=match):
            PipelineUpdater(Batches((X,)), chainer.optimizers.SGD().setup(
                model), ranks, converter=as_it_is, **options)
    with pytest.raises(TypeError, match="argument 'micro_batch'"):
        PipelineUpdater(Batches((X,)), None, comm, micro_batch=2)
    refused_by(r'must be set up with a Divisible .*partition\(model, example, '
               'comm', Net())
    model = cut(comm)
    for other in (comm.Dup(), MPI.COMM_SELF):
        refused_by('cut for other ranks; give PipelineUpdater the comm that '
                   'partition', model, other)
    refused_by('seed', model, seed=comm.rank)
    refused_by('another loss_func; pass this one to partition', model,
               loss_func=F.mean_squared_error)
    refused_by('a stage has 1 replicas.*is for 2', Divisible(
        MultiNodeBatchNormalization(4, create_communicator('float32', comm)),
        L.Linear(4, 1)).stage(comm, 'layers'))
    refused_by(r'rank 1: ValueError: stage 1 of 2 has <Plain: layers', Plain(
        ).share(0, 2))
    refused_by('the cut of the layers is', Plain().share(
        comm.rank, 2, [4, 3] if comm.rank else [3, 4]))


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
    updater = Job(comm).updater
    for given in (), (None,), (np.zeros((0, 8), 'f'),):
        with pytest.raises(ValueError, match='rank' if given else
                           'first stage of each pipeline needs arrays'):
            updater.predict(*given)
