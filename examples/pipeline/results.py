"""The table and the picture at the end of a run."""
import json
import os
from statistics import median

from chainer_fp8pipe.report.events import Event, idle_share

_ACCURACY = 'validation/main/accuracy'


def summarise(log, grid, schedule, seconds, timeline, drawn):
    """What is shown of a run.

    Args:
        log: What ``LogReport`` wrote.
        grid: Where the ranks were.
        schedule: Of the pipeline.
        seconds: Of each update of this run but the first.
        timeline: The Chrome trace of an update; None: there is none.
        drawn: The number of that update.
    """
    last = log[-1]
    accuracies = [100 * entry[_ACCURACY] for entry in log]
    return {
        'schedule': schedule.name,
        'stages': schedule.stages,
        'chunks': schedule.chunks,
        'replicas': grid.replicas,
        'micro_batches': schedule.micro_batches,
        'epochs': last['epoch'],
        'updates': last['iteration'],
        'final': accuracies[-1],
        'best': max(accuracies),
        'milliseconds': 1e3 * median(seconds) if len(seconds) else None,
        # of the last epoch, so after any warm-up
        'bytes': last.get('comm/bytes'),
        'seconds': last['elapsed_time'],
        'ranks_of_node': grid.nodes.count(grid.nodes[0]),
        'cores_of_node': _cores(),
        'drawn': drawn,
        'idle': timeline and idle_shares(timeline),
    }


def _cores():
    """Cores that this process may use, where the system tells."""
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def idle_shares(timeline):
    """Per cent of all ranks' time in which they do not compute.

    Of the whole update, and of the passes alone: update and exchange with
    the replicas come after what a schedule is about.
    """
    with open(timeline) as file:
        rows = json.load(file)['traceEvents']
    events = [Event(row['args']['rank'], row['cat'], row['ts'] / 1e6,
                    (row['ts'] + row['dur']) / 1e6,
                    row['args'].get('micro_batch'), row['args'].get('chunk'),
                    lane=row['args'].get('lane', ''))
              for row in rows if row['ph'] == 'X']
    passes = [event for event in events if event.micro_batch is not None]
    return {'update': 100 * idle_share(events),
            'passes': 100 * idle_share(passes)}


def print_table(summary, files):
    """A line for each thing that one wants to know of a run.

    Args:
        summary: What :func:`summarise` returned.
        files: What is written where.
    """
    def row(title, value, unit, explanation):
        print(f'{title:18}{value:>10} {unit:3}{explanation}'.rstrip())
    print()
    row('test accuracy', f'{summary["final"]:.2f}', '%',
        f'best: {summary["best"]:.2f} %')
    if summary['milliseconds']:
        row('time per update', f'{summary["milliseconds"]:.1f}', 'ms',
            'median')
    if summary['bytes']:
        row('gradients', f'{summary["bytes"] / 1e3:,.1f}', 'kB',
            'sent by rank 0 per update')
    if summary['idle']:
        ranks, cores = summary['ranks_of_node'], summary['cores_of_node']
        shares = {name: f'{share:.1f}'
                  for name, share in summary['idle'].items()}
        row('idle, measured', shares['update'], '%',
            f"of the ranks' time in update {summary['drawn']}"
            + (f' ({ranks} ranks on {cores} cores)' if ranks > cores else ''))
        row('', shares['passes'], '%',
            'until the end of its last backward pass')
    for name, path in files.items():
        print(f'{name:18}{path}')


def plot_curves(log, title, path):
    """Loss and accuracy, training and test, against epochs, as PNG."""
    # Rank 0 draws; the import would take all ranks a second at the start.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    figure = Figure(figsize=(10, 4.5), layout='constrained')
    loss, accuracy = figure.subplots(1, 2)
    epochs = [entry['epoch'] for entry in log]
    for label, place, marker in (('training', 'main', 'o'),
                                 ('test', 'validation/main', 's')):
        style = {'label': label, 'marker': marker, 'markersize': 4}
        loss.plot(epochs, [entry[f'{place}/loss'] for entry in log], **style)
        accuracy.plot(epochs, [100 * entry[f'{place}/accuracy']
                               for entry in log], **style)
    loss.set_ylabel('loss (cross-entropy)')
    loss.set_yscale('log')
    accuracy.set_ylabel('accuracy [%]')
    for axes in (loss, accuracy):
        axes.set_xlabel('epoch')
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3, which='both')
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
