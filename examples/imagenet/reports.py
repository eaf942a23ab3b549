"""What a run prints, logs, draws and leaves behind."""
import json
import os
import time

from chainer_fp8pipe.training.extensions import CommunicationReport

import chainer
from chainer.training import extension, extensions
from curves import plot_log
from input_report import InputReport

_COLUMNS = ['epoch', 'iteration', 'main/loss', 'main/top1', 'val/loss',
            'val/top1', 'val/top5', 'lr', 'images/s', 'input_s', 'skipped',
            'elapsed_time']


def report(options, comm, trainer, iterators):
    """Adds what is logged, printed and drawn."""
    def trigger(trainer):
        updater = trainer.updater
        return updater.is_new_epoch or (
            options.log and updater.iteration % options.log == 0)
    trainer.extend(InputReport(trainer.updater, iterators, comm),
                   trigger=trigger)
    if hasattr(comm, 'events'):
        trainer.extend(CommunicationReport(comm))
    if comm.rank:
        return
    optimizer = trainer.updater.get_optimizer('main')
    columns = list(_COLUMNS)
    values = {'lr': lambda trainer: optimizer.lr,
              'epoch_detail': lambda trainer: trainer.updater.epoch_detail}
    if options.mixed_precision:
        values['loss_scale'] = lambda trainer: optimizer._loss_scale
        columns.insert(columns.index('lr') + 1, 'loss_scale')
    for name, value in values.items():
        trainer.extend(extensions.observe_value(name, value), name=name,
                       trigger=trigger)
    trainer.extend(extensions.LogReport(trigger=trigger))
    trainer.extend(extensions.PrintReport(columns), trigger=trigger)
    trainer.extend(draw(options), name='curves', trigger=(1, 'epoch'),
                   priority=extension.PRIORITY_READER - 1)
    trainer.extend(extensions.ProgressBar(update_interval=10))


def draw(options, seconds=60):
    """An extension that draws the curves so far, now and then."""
    drawn = [time.monotonic()]

    def curves(trainer):
        if time.monotonic() - drawn[0] > seconds:
            plot(options)
            drawn[0] = time.monotonic()
    return curves


def plot(options):
    """Draws ``curves.png`` from the log."""
    plot_log(os.path.join(options.out, 'log'),
             os.path.join(options.out, 'curves.png'),
             f'{options.arch}, gradients in {options.communicator}')


def announce(options, comm, trainer, start):
    """Says what will be trained, and how."""
    updater = trainer.updater
    model = updater.get_optimizer('main').target
    print(f'{options.arch}: {model.count_params():,} parameters, images of '
          f'{options.insize} x {options.insize}\n'
          f'ranks: {comm.size}, with {options.batchsize} images each in '
          f'{updater.get_iterator("main").batches_per_epoch} updates per '
          f'epoch\ngradients: {options.communicator}')
    if options.bn_tile or options.group_bn > 1:
        group = ' x '.join(map(str, options.bn_tile or [options.group_bn]))
        print(f'batch normalisation: over {group} ranks')
    if start:
        print(f'goes on after iteration {start}')


def finish(options, comm, evaluation):
    """Writes what was evaluated last, and says where everything is."""
    with evaluation.weights():
        if comm.rank:
            return
        path = os.path.join(options.out, 'model.npz')
        chainer.serializers.save_npz(
            path, evaluation.get_target('main').predictor)
    with open(os.path.join(options.out, 'log')) as file:
        last = json.load(file)[-1]
    plot(options)
    print(f'\nvalidation  top 1: {100 * last["val/top1"]:.2f} %  top 5: '
          f'{100 * last["val/top5"]:.2f} %\nmodel       {path}')
    for name, what in (('curves', 'curves.png'), ('log', 'log')):
        print(f'{name:11} {os.path.join(options.out, what)}')
