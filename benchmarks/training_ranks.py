"""What the ranks of the training benchmark do: started by mpiexec.

    python training_ranks.py steps|accelerator|breakdown REPEATS WITH_TORCH
        RESULT.json
"""
from __future__ import annotations

import json
import os
import sys
import time

import chainer_fp8pipe

import chainer
import chainer.links as L
import chainermn
import numpy
import training_accelerator
from mpi4py import MPI
from training_networks import NETWORKS, Mlp

BATCH = 32
WIDTHS = (1024, 2048, 1024, 10)
# (label, communicator, options): the exchange of an update in four ways.
CASES = [('float32', 'float32', {}),
         ('fp8', 'fp8', {'warmup': 0}),
         ('fp8, overlapped', 'fp8', {'warmup': 0, 'overlap': True}),
         ('fp8, wait in next forward', 'fp8',
          {'warmup': 0, 'overlap': 'next_forward'}),
         ('int4', 'int4', {'warmup': 0}),
         ('int4, overlapped', 'int4', {'warmup': 0, 'overlap': True}),
         ('int4, wait in next forward', 'int4',
          {'warmup': 0, 'overlap': 'next_forward'})]
# Steps that are timed together: what one leaves to the next is in it.
BLOCK = 10


def main(what: str, repeats: str, with_torch: str, result: str) -> None:
    comm = MPI.COMM_WORLD
    _keep_to_own_cores(comm.rank, comm.size)
    if what == 'breakdown':
        rows = breakdown(comm, int(repeats))
    else:
        rows = steps(comm, NETWORK[what], int(repeats), with_torch == 'yes')
    if comm.rank == 0:
        with open(result, 'w') as file:
            json.dump(rows, file)


def _keep_to_own_cores(host, hosts):
    """Hosts share this machine's cores evenly, and none moves to another's.

    Otherwise three of four hosts may meet on one of two cores for a while,
    and all wait for them.
    """
    if not hasattr(os, 'sched_setaffinity'):
        return
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // hosts, 1)
    os.sched_setaffinity(0, {
        cores[(host * each + index) % len(cores)] for index in range(each)})


def steps(comm, network, repeats, with_torch):
    """Seconds of a training step, ours and PyTorch's in turns.

    Each figure is the mean of a block of steps, until all parameters of the
    last one can be read.
    """
    made = {label: _chainer_step(comm, network, name, options)
            for label, name, options in CASES}
    if with_torch:
        made['PyTorch DDP, gloo, float32'] = _torch_step(comm, network, False)
        made['PyTorch DDP, gloo, fp16 hook'] = _torch_step(comm, network,
                                                           True)
    seconds = {label: [] for label in made}
    warming_up = 2
    for repeat in range(repeats + warming_up):
        for label, step in made.items():
            taken = _timed(comm, step)
            if repeat >= warming_up:
                seconds[label].append(taken)
    return [{'label': label, 'seconds': times}
            for label, times in seconds.items()]


def breakdown(comm, repeats):
    """Where an update's seconds go, as figures 5 and 6 of the fp8 paper."""
    rows = []
    for network in NETWORKS:
        for label, name, options in CASES[:2]:
            model = NETWORKS[network].make()
            x, t = NETWORKS[network].batch(comm.rank)
            communicator = chainer_fp8pipe.create_communicator(
                name, comm, **options)
            optimizer = chainermn.create_multi_node_optimizer(
                chainer.optimizers.MomentumSGD(1e-6), communicator)
            optimizer.setup(model)
            optimizer.update(model, x, t)       # broadcasts
            optimizer.update(model, x, t)
            found = []
            for _ in range(repeats):
                found.append(_parts(comm, communicator, optimizer, model,
                                    x, t))
            rows.append({'network': network, 'label': label,
                         'parameters': model.count_params(),
                         'parts': found})
            communicator.finalize()
            if comm.rank == 0:
                print(f'  {network}, {label}: done', flush=True)
    return rows


def _parts(comm, communicator, optimizer, model, x, t):
    before = dict(communicator.events.seconds)
    comm.Barrier()
    start = time.perf_counter()
    loss = model(x, t)
    model.cleargrads()
    loss.backward()
    comm.Barrier()      # to wait for slower ranks is no part of an exchange
    computed = time.perf_counter()
    communicator.multi_node_mean_grad(model)
    exchanged = time.perf_counter()
    optimizer.actual_optimizer.update()
    end = time.perf_counter()
    parts = {name: communicator.events.seconds[name] - before[name]
             for name in ('encode', 'exchange', 'decode')}
    return {'forward and backward': computed - start, **parts,
            'other': end - exchanged + exchanged - computed
            - sum(parts.values())}


def _timed(comm, step):
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(BLOCK):
        parameters = step()
    for parameter in parameters:
        assert parameter.data is not None       # waits, if it must
    return comm.allreduce(time.perf_counter() - start, MPI.MAX) / BLOCK


def _chainer_step(comm, network, name, options):
    model = network.make()
    communicator = chainer_fp8pipe.create_communicator(name, comm, **options)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(1e-3), communicator)
    optimizer.setup(model)
    x, t = network.data(comm.rank)

    def step():
        optimizer.update(model, x, t)
        return model.params()
    return step


def _torch_step(comm, network, half):
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    if not dist.is_initialized():
        torch.set_num_threads(1)
        dist.init_process_group('gloo', rank=comm.rank, world_size=comm.size)
    model = torch.nn.parallel.DistributedDataParallel(
        network.make_torch(), bucket_cap_mb=4)      # as ours
    if half:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x, t = map(torch.from_numpy, network.data(comm.rank))
    t = t.long()

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), t).backward()
        optimizer.step()
        return model.parameters()
    return step


class _Perceptron:
    """An MLP that the ranks compute themselves."""

    @staticmethod
    def make():
        model = L.Classifier(Mlp(WIDTHS))
        model.compute_accuracy = False
        return model

    @staticmethod
    def make_torch():
        import torch
        layers = []
        for n_in, n_out in zip(WIDTHS[:-1], WIDTHS[1:], strict=True):
            layers += [torch.nn.Linear(n_in, n_out), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1])

    @staticmethod
    def data(rank):
        return _random(rank, BATCH, WIDTHS[0], WIDTHS[-1])


class _Accelerator:
    """A network that is computed elsewhere."""

    make = training_accelerator.Network
    make_torch = staticmethod(training_accelerator.torch_network)

    @staticmethod
    def data(rank):
        width = training_accelerator.WIDTH
        return _random(rank, training_accelerator.BATCH, width, width)


NETWORK = {'steps': _Perceptron, 'accelerator': _Accelerator}


def _random(rank, batch, inputs, outputs):
    generator = numpy.random.default_rng(rank)
    return (generator.standard_normal((batch, inputs), numpy.float32),
            generator.integers(0, outputs, batch).astype(numpy.int32))


if __name__ == '__main__':
    main(*sys.argv[1:])
