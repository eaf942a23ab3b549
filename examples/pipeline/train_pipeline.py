"""Trains a network whose layers are divided over MPI ranks, as a pipeline.

    mpiexec -n 4 python examples/pipeline/train_pipeline.py

makes 2 stages with half of the layers each, and 2 replicas of each stage,
which average their gradients in fp8.  What the ranks did in one update is
drawn to timeline.svg; at the end the whole model is in model.npz.
"""
import json
import os
import sys
import time

from chainer_fp8pipe import (
    PipelineUpdater,
    ProcessGrid,
    ReplicaIterator,
    create_communicator,
)
from chainer_fp8pipe.mpi.agreement import raise_together
from chainer_fp8pipe.training.extensions import (
    CommunicationReport,
    PipelineTimeline,
    Snapshot,
    find_snapshots,
    resume,
    save_whole_model,
)

import chainer
import chainermn
import numpy
from arguments import check, make_parser
from chainer.training import Trainer, extensions
from models import NETWORKS
from mpi4py import MPI
from results import plot_curves, print_table, summarise

sys.path.insert(0, os.path.join(os.path.dirname(__file__), os.pardir,
                                'digits'))
from data import load
from train_digits import (
    cosine_decay,
    explained,
    name_and_options,
    only_rank_0_prints,
    prepare_directory,
    use_device,
)

_COLUMNS = ['epoch', 'iteration', 'main/loss', 'main/accuracy',
            'validation/main/loss', 'validation/main/accuracy',
            'elapsed_time']


def on_root(action):
    """What rank 0 returns, there; its error is raised on all ranks."""
    return raise_together(
        MPI.COMM_WORLD, lambda: action() if MPI.COMM_WORLD.rank == 0 else None,
        error=ValueError)


def deal(datasets, grid):
    """Gives the data sets to the ranks that read them.

    These are those of the first stage; the others get something as long.
    Returns both data sets, and the shape of an image.

    Args:
        datasets: Both, on rank 0, which is of the first stage.
        grid: Where the ranks are.
    """
    about = None
    if grid.comm.rank == 0:
        about = [len(dataset) for dataset in datasets], datasets[0][0][0].shape
    lengths, shape = grid.comm.bcast(about)
    datasets = (grid.data.bcast(datasets) if grid.stage_index == 0
                else [range(length) for length in lengths])
    return *datasets, shape


def make_stage(options, grid, train_set, shape):
    """This rank's layers."""
    sizes = {name: getattr(options, name) for name in ('depth', 'width')
             if getattr(options, name)}
    model = NETWORKS[options.network](shape, seed=options.seed, **sizes)
    example = None
    if options.balance == 'time' and grid.comm.rank == 0:
        example, _ = chainer.dataset.concat_examples(train_set[
            :options.batchsize // (options.micro_batches * grid.replicas)])
    return model.stage(grid, options.balance, options.chunks, example)


def make_communicator(options, grid, updates):
    """That of this stage's replicas; fp8 starts with 5 % in float32."""
    name, given = name_and_options(options.communicator)
    if name.startswith('fp8'):
        given.setdefault('warmup', updates // 20)
    return create_communicator(name, grid.data, **given)


def make_trainer(options, grid, datasets):
    """What trains this rank's stage, and a list.

    The list gets what the clock says at the end of each update.
    """
    train_set, test_set, shape = deal(datasets, grid)
    updates = count_updates(options, len(train_set))
    communicator = make_communicator(options, grid, updates)
    model = make_stage(options, grid, train_set, shape)

    optimizer = chainer.optimizers.MomentumSGD(options.lr)
    if grid.replicas > 1:
        optimizer = chainermn.create_multi_node_optimizer(
            optimizer, communicator)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))
    iterator = ReplicaIterator(train_set, options.batchsize, grid=grid,
                               seed=options.seed)
    updater = PipelineUpdater(
        iterator, optimizer, grid, micro_batches=options.micro_batches,
        schedule=options.schedule, recompute=options.recompute,
        device=use_device(options.device), seed=options.seed)
    trainer = Trainer(updater, (options.epoch, 'epoch'), options.out)

    trainer.extend(make_evaluator(options, updater, test_set, communicator))
    trainer.extend(cosine_decay(options.lr, updates),
                   trigger=(1, 'iteration'))
    if hasattr(communicator, 'events'):
        trainer.extend(CommunicationReport(communicator))
    trainer.extend(PipelineTimeline(updater, options.timeline))
    times = []
    trainer.extend(lambda trainer: times.append(time.perf_counter()),
                   name='clock', trigger=(1, 'iteration'))
    if grid.comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(_COLUMNS))
        trainer.extend(extensions.ProgressBar(update_interval=10))
    trainer.extend(Snapshot(grid, retain=2))
    return trainer, times


def count_updates(options, samples):
    """How many there are; the last one is drawn unless another is wanted."""
    updates = -(-samples * options.epoch // options.batchsize)
    options.timeline = options.timeline or updates
    if options.timeline > updates:
        raise ValueError(f'--timeline {options.timeline} does not come: '
                         f'there are {updates} updates')
    return updates


def make_evaluator(options, updater, test_set, communicator):
    """Each replica takes its share of the test set, in equal batches."""
    grid = updater.grid
    batches = -(-len(test_set) // (4 * options.batchsize))
    iterator = ReplicaIterator(
        test_set, -(-len(test_set) // batches), grid=grid, repeat=False,
        shuffle=False)
    evaluator = extensions.Evaluator(
        iterator, updater.get_optimizer('main').target,
        eval_func=updater.evaluate)
    if grid.replicas > 1:
        evaluator = chainermn.create_multi_node_evaluator(
            evaluator, communicator)
    return evaluator


def prepare(options):
    """Makes the directory; returns whether there is a snapshot to go on from.

    Unless the run goes on, an old run's results are moved aside.
    """
    found = False
    if find_snapshots(options.out):
        found = prepare_directory(options.out, options.resume)
    os.makedirs(options.out, exist_ok=True)
    return found


def report(options, trainer, start, times):
    """Curves, ``summary.json`` and a table, which names all files.

    Args:
        options: Of the command line.
        trainer: After training.
        start: The iteration after which this run went on.
        times: When each of its updates ended.
    """
    def path(name):
        return os.path.join(options.out, name)
    updater = trainer.updater
    with open(path('log')) as file:
        log = json.load(file)
    # An update before a resume may have been that of another grid.
    drawn = start < options.timeline
    summary = summarise(
        log, updater.grid, updater.schedule, numpy.diff(times),
        path('timeline.json') if drawn else None, options.timeline)
    with open(path('summary.json'), 'w') as file:
        json.dump(summary, file, indent=1)
    plot_curves(log, f'{options.dataset}, {options.network}, stages x '
                f'replicas: {updater.grid.stages} x {updater.grid.replicas}',
                path('curves.png'))
    print_table(summary, {name: path(file) for name, file in (
        ('curves', 'curves.png'), ('model', 'model.npz'),
        ('trace', 'timeline.json'), ('timeline', 'timeline.svg'))})


def main():
    parser = make_parser(__doc__)
    with only_rank_0_prints():
        options = parser.parse_args()
    with explained(parser):
        check(options)
        datasets = on_root(lambda: load(options.dataset, options.root))
        grid = ProcessGrid(MPI.COMM_WORLD, options.pipeline)
        trainer, times = make_trainer(options, grid, datasets)
        found = grid.comm.bcast(on_root(lambda: prepare(options)))
        start = resume(trainer, grid, options.out,
                       damaged='aside') if found else 0
    model = trainer.updater.get_optimizer('main').target
    if grid.comm.rank == 0:
        print(f'{grid}\n\n{model}\n')
        if found:
            print(f'goes on after iteration {start}')
    trainer.run()
    save_whole_model(os.path.join(options.out, 'model.npz'), model, grid)
    if grid.comm.rank == 0:
        report(options, trainer, start, times)


if __name__ == '__main__':
    main()
