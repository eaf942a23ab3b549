"""What the ranks of ``local_steps.py`` do.

``train`` records test accuracy against updates, ``times`` the seconds of an
update, and ``utilisation`` those of a step that is computed elsewhere.
"""
from __future__ import annotations

import math
import time

import chainer_fp8pipe

import chainer
import chainer.links as L
import chainermn
import numpy
from environment import as_rank
from mpi4py import MPI
from near_exact_runs import risen_and_fallen
from photographs import thumbnails
from training_ranks import Mlp, keep_to_own_cores

WIDTHS = 768, 1024, 1024, 10            # 1.85 M parameters
UPDATES, BATCH, RATE = 320, 64, 0.1     # the batch is that of all ranks
#: Updates in float32, and then updates with an exchange each, before others.
EXACT, SYNCHRONOUS = 4, 16
PERIOD = 8
_IMAGES = 2000                          # for training, and as many for a test
_INT4 = {'warmup': EXACT}
_LOCAL = {**_INT4, 'sync_steps': EXACT + SYNCHRONOUS}
_HALF = {**_INT4, 'sync_steps': UPDATES // 2}
#: By label: communicator and options; None: PyTorch.
METHODS = {
    'float32': ('float32', {}),
    'fp8': ('fp8', {'warmup': EXACT, 'overlap': 'next_forward'}),
    'int4': ('int4', {**_INT4, 'overlap': 'next_forward'}),
    'int4, not overlapped': ('int4', _INT4),
    'int4, 8 local steps': ('int4', {**_LOCAL, 'local_steps': 8}),
    'int4, 32 local steps': ('int4', {**_LOCAL, 'local_steps': 32}),
    'int4, 8 local, 2nd half': ('int4', {**_HALF, 'local_steps': 8}),
    'PyTorch, float32': None,
    'PyTorch, fp16 hook': None,
    'PyTorch, PowerSGD hook': None,
    'PyTorch, PostLocalSGD': None,
}


def main(comm, job):
    keep_to_own_cores(comm.rank, comm.size)
    return {'train': train, 'times': times, 'utilisation': utilisation}[
        job['what']](comm, job)


def train(comm, job):
    """Test accuracy in points after every period, by label and seed."""
    (x, t), test = _data()
    found = []
    for seed in job['seeds']:
        for label in job['labels']:
            order = numpy.random.RandomState(seed)
            step = _made(comm, label, seed)
            curve = []
            for number in range(UPDATES):
                own = order.choice(_IMAGES, BATCH, False)[
                    comm.rank::comm.size]
                step(x[own], t[own], RATE * risen_and_fallen(
                    number, UPDATES, 0.0))
                if (number + 1) % PERIOD == 0:
                    curve.append([number + 1, step.accuracy(*test)])
            step.close()
            found.append({'label': label, 'seed': seed, 'curve': curve})
            if comm.rank == 0:
                print(f'  seed {seed}, {label}: {curve[-1][1]:.2f}',
                      flush=True)
    return found


def times(comm, job):
    """Seconds of an update in which a method has left its first updates.

    A block is one period of the local steps, or as few updates as say
    something where each has an exchange of its own.
    """
    (x, t), _ = _data()
    own = slice(comm.rank, BATCH, comm.size)
    rows = []
    for label in job['labels']:
        step = _made(comm, label, 0, begin=False)
        block = _period(label)
        seconds = []
        for repeat in range(job['repeats'] + 1):
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(max(block, job['least'])):
                step(x[own], t[own], 1e-3)
            step.finish()
            taken = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            if repeat:
                seconds.append(taken / max(block, job['least']))
        step.close()
        rows.append({'label': label, 'seconds': seconds})
    return rows


def _period(label):
    """Updates from one exchange to the next."""
    return int(label.split()[1]) if 'local' in label else (
        PERIOD if 'PostLocal' in label else 1)


def _data():
    x, t = thumbnails(2 * _IMAGES)
    x = x.reshape(len(x), -1)
    return (x[:_IMAGES], t[:_IMAGES]), (x[_IMAGES:], t[_IMAGES:])


def _made(comm, label, seed, begin=True):
    """One method's training; ``begin=False`` leaves out its first updates."""
    numpy.random.seed(seed)
    kind = _Chainer if METHODS[label] else _Torch
    return kind(comm, L.Classifier(Mlp(WIDTHS)), label, begin)


class _Chainer:
    """A training of this package."""

    def __init__(self, comm, model, label, begin):
        name, options = METHODS[label]
        if not begin:
            options = {key: 0 if key in ('warmup', 'sync_steps') else value
                       for key, value in options.items()}
        self.model = model
        model.compute_accuracy = False
        self.communicator = chainer_fp8pipe.create_communicator(
            name, comm, **options)
        self.optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.MomentumSGD(RATE), self.communicator)
        self.optimizer.setup(model)
        model.cleargrads()
        self.optimizer.update()         # broadcasts

    def __call__(self, x, t, rate):
        self.optimizer.lr = rate
        self.optimizer.update(self.model, x, t)

    def finish(self):
        """Waits until the last update's parameters can be read."""
        for parameter in self.model.params():
            assert parameter.data is not None

    def accuracy(self, x, t):
        with (chainer.using_config('train', False),
              chainer.no_backprop_mode(),
              self.communicator.common()):
            found = self.model.predictor(x).array.argmax(1)
        return 100 * float((found == t).mean())

    def close(self):
        self.finish()
        self.communicator.finalize()


class _Torch:
    """A training of PyTorch, from the same weights."""

    def __init__(self, comm, model, label, begin):
        import torch
        import torch.distributed as dist
        self.torch = torch
        if not dist.is_initialized():
            torch.set_num_threads(1)
            dist.init_process_group('gloo', rank=comm.rank,
                                    world_size=comm.size)
        layers = []
        for link in model.predictor:
            layer = torch.nn.Linear(link.W.shape[1], link.W.shape[0])
            with torch.no_grad():
                layer.weight.copy_(torch.from_numpy(link.W.array))
                layer.bias.copy_(torch.from_numpy(link.b.array))
            layers += [layer, torch.nn.ReLU()]
        # Where several buckets are on their way, gloo confuses PowerSGD's
        # exchanges, which each rank starts in an order of its own.
        self.model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*layers[:-1]),
            bucket_cap_mb=100 if 'PowerSGD' in label else 4)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), RATE, momentum=0.9)
        first = EXACT + SYNCHRONOUS if begin else 2     # PowerSGD needs 2
        getattr(self, '_' + label.split()[1], int)(first)

    def _fp16(self, first):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def _PowerSGD(self, first):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
        self.model.register_comm_hook(
            powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=2,
                start_powerSGD_iter=first), powerSGD_hook.powerSGD_hook)

    def _PostLocalSGD(self, first):
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import (
            post_localSGD_hook,
        )
        from torch.distributed.algorithms.model_averaging import averagers
        from torch.distributed.optim import PostLocalSGDOptimizer
        alone, _ = dist.new_subgroups(1)
        self.model.register_comm_hook(
            post_localSGD_hook.PostLocalSGDState(
                None, alone, first, post_local_gradient_allreduce=False),
            post_localSGD_hook.post_localSGD_hook)
        self.optimizer = PostLocalSGDOptimizer(
            self.optimizer, averagers.PeriodicModelAverager(PERIOD, first))

    def __call__(self, x, t, rate):
        for group in self.optimizer.param_groups:
            group['lr'] = rate
        self.optimizer.zero_grad()
        self.torch.nn.functional.cross_entropy(
            self.model(self.torch.from_numpy(x)),
            self.torch.from_numpy(t).long()).backward()
        self.optimizer.step()

    def finish(self):
        """Nothing of an update is left when it returns."""

    def accuracy(self, x, t):
        with self.torch.no_grad():
            found = self.model.module(self.torch.from_numpy(x)).argmax(1)
        return 100 * float((found.numpy() == t).mean())

    def close(self):
        self.model = self.optimizer = None


# --- utilisation ------------------------------------------------------------

_LAYERS, _LARGE = 8, 3_850_000          # 30.8 M parameters
STEP = 26e-3                            # seconds that an accelerator computes


class _Elsewhere(chainer.FunctionNode):
    """A layer that takes its time, but no processor; its gradient is there.
    """

    def __init__(self, gradient):
        self.gradient = gradient

    def forward(self, inputs):
        time.sleep(STEP / _LAYERS / 3)
        return inputs[:1]

    def backward(self, indexes, gradients):
        time.sleep(STEP / _LAYERS * 2 / 3)
        return gradients[0], self.gradient


class _Remote(chainer.Chain):
    def __init__(self, rank):
        super().__init__()
        generator = numpy.random.default_rng(rank)
        with self.init_scope():
            for number in range(_LAYERS):
                setattr(self, f'W{number}', chainer.Parameter(
                    generator.standard_normal(_LARGE, numpy.float32)))
        self.gradients = [chainer.Variable(generator.standard_normal(
            _LARGE, numpy.float32)) for _ in range(_LAYERS)]

    def forward(self, x):
        for number, gradient in enumerate(self.gradients):
            x, = _Elsewhere(gradient).apply((x, self[f'W{number}']))
        return x


class _Still(chainer.optimizer.GradientMethod):
    """Whose update an accelerator would compute, within its 26 ms."""

    def create_update_rule(self):
        return _Rule()


class _Rule(chainer.optimizer.UpdateRule):
    def update_core(self, parameter):
        pass


def utilisation(comm, job):
    """Seconds of a step, by local steps between exchanges."""
    model = _Remote(comm.rank)
    rows = []
    for steps in job['steps']:
        more = ({'local_steps': steps, 'sync_steps': 0} if steps > 1
                else {'overlap': 'next_forward'})
        communicator = chainer_fp8pipe.create_communicator(
            'int4', comm, warmup=0, check_every=0, **more)
        optimizer = chainermn.create_multi_node_optimizer(
            _Still(), communicator)
        optimizer.setup(model)
        x = numpy.zeros((), numpy.float32)
        optimizer.update(model, x)              # broadcasts
        seconds = []
        for repeat in range(job['repeats'] + 1):
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(math.ceil(job['least'] / steps) * steps):
                optimizer.update(model, x)
            for parameter in model.params():
                assert parameter.data is not None
            taken = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            if repeat:
                seconds.append(taken / (
                    math.ceil(job['least'] / steps) * steps))
        communicator.finalize()
        rows.append({'steps': steps, 'seconds': seconds})
    return rows


if __name__ == '__main__':
    as_rank(main)
