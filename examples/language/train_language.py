r"""Trains a language model whose layers are divided over MPI ranks.

    mpiexec -n 4 python examples/language/train_language.py \
        --memory 150MB

trains a transformer of 25 million parameters on the sources of Python's
standard library.  With gradients and Adam's means these take 400 MB; they are
divided such that 150 MB are enough on each rank.  Without mpiexec, the same
model is trained in one process: nothing in it knows of ranks.
"""
import json
import math
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
from arguments import check, make_parser
from chainer.dataset import concat_examples
from chainer.training import Trainer, extensions
from chainer.training.updaters import StandardUpdater
from models import MODELS
from mpi4py import MPI
from results import add_bits, plot_curves, print_table, summarise
from text import Windows, prepare, save

sys.path.insert(0, os.path.join(os.path.dirname(__file__), os.pardir,
                                'digits'))
from train_digits import (
    explained,
    name_and_options,
    only_rank_0_prints,
    prepare_directory,
    seed_random,
)

_COLUMNS = ['iteration', 'main/loss', 'main/bpc', 'validation/main/loss',
            'validation/main/bpc', 'elapsed_time']

# Batches for a validation, which must not take longer than the training.
_VALIDATION = 8


def on_root(action):
    """What rank 0 returns, on all ranks; so is its error."""
    comm = MPI.COMM_WORLD
    return comm.bcast(raise_together(
        comm, lambda: action() if comm.rank == 0 else None,
        error=ValueError))


def make_windows(options, text):
    """Both data sets; that for validation has whole batches only."""
    train_set = Windows(text.training, options.length)
    most = len(Windows(text.validation, options.length)) // options.batchsize
    test_set = Windows(text.validation, options.length,
                       min(most, _VALIDATION) * options.batchsize)
    if not len(test_set) or len(train_set) < options.batchsize:
        raise ValueError(
            f'--characters {options.characters} is too small for a batch of '
            f'{options.batchsize} texts of {options.length} tokens')
    return train_set, test_set


def make_model(options, grid, tokens, train_set):
    """The model, or what this rank has of it."""
    def build(layers):
        return MODELS[options.model](
            tokens, options.length, units=options.units, layers=layers,
            heads=options.heads, dropout=options.dropout)

    if grid is None:
        seed_random(options.seed)
        return build(options.layers)
    from cutting import make_stage
    size = options.batchsize // (options.micro_batches * grid.replicas)
    example = concat_examples([train_set[place] for place in range(size)])
    return make_stage(options, build, example, grid)


def make_communicator(options, grid):
    """That of this stage's replicas; fp8 starts with 5 % in float32."""
    name, given = name_and_options(options.communicator)
    if name.startswith('fp8'):
        given.setdefault('warmup', options.iterations // 20)
    return create_communicator(name, grid.data, **given)


def make_updater(options, grid, iterator, model, communicator):
    """What does one update, alone or together with the other ranks."""
    optimizer = chainer.optimizers.Adam(options.lr)
    if communicator:
        optimizer = chainermn.create_multi_node_optimizer(
            optimizer, communicator)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.0))
    if grid is None:
        return StandardUpdater(iterator, optimizer)
    return PipelineUpdater(
        iterator, optimizer, grid, micro_batches=options.micro_batches,
        schedule=options.schedule, seed=options.seed)


def make_trainer(options, grid, text):
    """What trains, and a list.

    The list gets what the clock says at the end of each update.

    Args:
        options: Of the command line.
        grid: Where the ranks are; None on a single one.
        text: The tokens.
    """
    train_set, test_set = make_windows(options, text)
    if options.epoch:
        options.iterations = math.ceil(
            options.epoch * len(train_set) / options.batchsize)
    communicator = (make_communicator(options, grid)
                    if grid and grid.replicas > 1 else None)
    model = make_model(options, grid, len(text.alphabet), train_set)
    iterator = ReplicaIterator(train_set, options.batchsize, grid=grid,
                               seed=options.seed)
    updater = make_updater(options, grid, iterator, model, communicator)
    trainer = Trainer(updater, (options.iterations, 'iteration'), options.out)

    trainer.extend(rise_and_fall(options.lr, options.iterations),
                   trigger=(1, 'iteration'))
    often = at_times(options)
    trainer.extend(make_evaluator(options, grid, updater, test_set,
                                  communicator), trigger=often)
    if hasattr(communicator, 'events'):
        trainer.extend(CommunicationReport(communicator))
    if grid:
        trainer.extend(PipelineTimeline(updater, options.iterations))
    times = []
    trainer.extend(lambda trainer: times.append(time.perf_counter()),
                   name='clock', trigger=(1, 'iteration'))
    if MPI.COMM_WORLD.rank == 0:
        trainer.extend(extensions.LogReport(
            trigger=often, postprocess=add_bits(text)))
        trainer.extend(extensions.PrintReport(_COLUMNS), trigger=often)
        trainer.extend(extensions.ProgressBar(update_interval=5))
    trainer.extend(Snapshot(grid or MPI.COMM_WORLD, retain=2), trigger=often)
    return trainer, times


def make_evaluator(options, grid, updater, test_set, communicator):
    """Loss and accuracy of the validation text."""
    iterator = ReplicaIterator(test_set, options.batchsize, grid=grid,
                               repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(
        iterator, updater.get_optimizer('main').target,
        eval_func=updater.evaluate if grid else None)
    if communicator:
        evaluator = chainermn.create_multi_node_evaluator(
            evaluator, communicator)
    return evaluator


def rise_and_fall(highest, updates):
    """Adam's alpha: a line up, half a cosine down to zero after the end."""
    rise = -(-updates // 10)

    def set_rate(trainer):
        number = trainer.updater.iteration + 1      # of the next update
        fallen = min(1, max(0, number - rise) / (updates - rise + 1))
        trainer.updater.get_optimizer('main').alpha = highest * min(
            number / rise, (1 + math.cos(math.pi * fallen)) / 2)
    set_rate.initialize = set_rate
    return set_rate


def at_times(options):
    """A trigger, every so many updates and after the last one."""
    every = options.log or max(1, options.iterations // 10)
    return lambda trainer: (
        trainer.updater.iteration % every == 0
        or trainer.updater.iteration == options.iterations)


def prepare_out(options, text):
    """Makes the directory; returns whether there is a snapshot to go on from.

    Unless the run goes on, an old run's results are moved aside.
    """
    found = False
    if find_snapshots(options.out):
        found = prepare_directory(options.out, options.resume)
    os.makedirs(options.out, exist_ok=True)
    save(text, options.vocabulary, os.path.join(options.out, 'tokens.npz'))
    return found


def announce(options, grid, trainer, text, start):
    """Says what is trained on what."""
    model = trainer.updater.get_optimizer('main').target
    if grid:
        print(f'{grid}\n\n{model}\n')
        if options.fill:
            print(f'{options.layers} layers are the most that fit')
    else:
        print(f'{options.model}: {model.count_params():,} parameters')
    print(f'{len(text.training):,} tokens of {len(text.alphabet):,} for '
          f'training, {len(text.validation):,} for validation')
    if start:
        print(f'goes on after iteration {start}')


def finish(options, grid, model, times):
    """The model, curves, ``summary.json`` and a table with all files."""
    def path(name):
        return os.path.join(options.out, name)
    if grid:
        save_whole_model(path('model.npz'), model, grid)
    else:
        chainer.serializers.save_npz(path('model.npz'), model)
    if MPI.COMM_WORLD.rank:
        return
    with open(path('log')) as file:
        log = json.load(file)
    summary = summarise(log, [
        end - start for start, end in zip(times, times[1:], strict=False)])
    with open(path('summary.json'), 'w') as file:
        json.dump(summary, file, indent=1)
    plot_curves(log, f'{options.model}, {options.layers} layers of '
                f'{options.units} units', path('curves.png'))
    files = {'curves': path('curves.png'), 'model': path('model.npz')}
    if grid:
        from cutting import save_plan
        files.update(save_plan(model, options.out))
        files['timeline'] = path('timeline.svg')
    print_table(summary, files)


def main():
    parser = make_parser(__doc__)
    with only_rank_0_prints():
        options = parser.parse_args()
    with explained(parser):
        check(options)
        text = on_root(lambda: prepare(
            options.characters, options.vocabulary,
            os.path.join(options.out, 'tokens.npz')))
        grid = (ProcessGrid(MPI.COMM_WORLD, options.pipeline)
                if MPI.COMM_WORLD.size > 1 else None)
        trainer, times = make_trainer(options, grid, text)
        found = on_root(lambda: prepare_out(options, text))
        start = (resume(trainer, grid or MPI.COMM_WORLD, options.out,
                        damaged='aside') if found else 0)
    if MPI.COMM_WORLD.rank == 0:
        announce(options, grid, trainer, text, start)
    trainer.run()
    finish(options, grid, trainer.updater.get_optimizer('main').target, times)


if __name__ == '__main__':
    main()
