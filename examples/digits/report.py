"""The table and the picture that compare training runs."""
import itertools
import os

from chainer_fp8pipe.report.page import write_page
from chainer_fp8pipe.report.record import read_record

_ACCURACY = 'validation/main/accuracy'


def summarise(name, log):
    """What is shown of a run, from what ``LogReport`` wrote."""
    last = log[-1]
    accuracies = [100 * entry[_ACCURACY] for entry in log]
    return {
        'name': name,
        'epochs': [entry['epoch'] for entry in log],
        'losses': [entry['main/loss'] for entry in log],
        'accuracies': accuracies,
        'final': accuracies[-1],
        'best': max(accuracies),
        # of the last epoch, so after any warm-up
        'bytes': last.get('comm/bytes'),
        'exchange': last.get('comm/exchange'),
        'codec': last.get('comm/encode', 0) + last.get('comm/decode', 0),
        'seconds': last['elapsed_time'],
        'updates': last['iteration'],
    }


def print_table(runs):
    """One line per run; bytes and times are of rank 0, in the last epoch."""
    width = max(14, *(len(run['name']) for run in runs))
    print(f'\n{"communicator":{width}}{"test accuracy [%]":>20}'
          f'{"bytes per update":>20}{"time per update [ms]":>24}'
          f'{"total":>9}')
    print(f'{"":{width}}{"final":>12}{"best":>8}{"sent":>12}{"ratio":>8}'
          f'{"exchange":>13}{"codec":>11}{"[s]":>9}')
    reference = next((run['bytes'] for run in runs
                      if run['name'] == 'float32'), None)
    for run in runs:
        line = f'{run["name"]:{width}}{run["final"]:12.2f}{run["best"]:8.2f}'
        if run['bytes'] is None:
            line += f'{"-":>12}{"-":>8}{"-":>13}{"-":>11}'
        else:
            ratio = (f'{run["bytes"] / reference:8.3f}' if reference
                     else f'{"-":>8}')
            line += (f'{run["bytes"]:12,.0f}{ratio}{run["exchange"]:13.2f}'
                     f'{run["codec"]:11.2f}')
        print(line + f'{run["seconds"]:9.1f}')


def plot_curves(runs, path):
    """Training loss and test error against epochs, as PNG."""
    # Rank 0 draws; the import would take all ranks a second at the start.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    figure = Figure(figsize=(10, 4.5), layout='constrained')
    loss, error = figure.subplots(1, 2)
    for run, marker in zip(runs, itertools.cycle('osv^D*Px')):
        style = {'label': run['name'], 'marker': marker, 'markersize': 4}
        loss.plot(run['epochs'], run['losses'], **style)
        error.plot(run['epochs'],
                   [100 - accuracy for accuracy in run['accuracies']],
                   **style)
    loss.set_ylabel('training loss (cross-entropy)')
    loss.set_yscale('log')
    error.set_ylabel('test error [%]')
    # A logarithm that has a place for zero errors.
    error.set_yscale('symlog', linthresh=1)
    error.set_ylim(bottom=0)
    error.yaxis.set_major_formatter('{x:g}')
    for axes in (loss, error):
        axes.set_xlabel('epoch')
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3, which='both')
        axes.legend(title='communicator')
    figure.suptitle('Handwritten digits: the same initial weights, gradients '
                    'averaged in different ways')
    figure.savefig(path, dpi=120)
    print(f'curves: {path}')


def write_report(out, names):
    """One page about all runs, from the records in their folders."""
    path = os.path.join(out, 'report.html')
    write_page([read_record(os.path.join(out, name)) for name in names], path)
    print(f'\nWhat the ranks did, in a browser: {path}')
