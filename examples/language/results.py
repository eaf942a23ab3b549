"""The table and the picture at the end of a run."""
import math
from statistics import median

#: Where the bits per character of both texts are in a log.
BITS = {'training': 'main/bpc', 'validation': 'validation/main/bpc'}


def bits_per_character(loss, text, alphabet):
    """What a mean loss is in bits for each character of a text.

    Args:
        loss: In nats per token.
        text: The tokens.
        alphabet: What they mean.
    """
    characters = len(alphabet.decode(text))
    return loss / math.log(2) * len(text) / characters


def add_bits(text):
    """For ``LogReport``: puts bits per character beside the losses.

    Texts do not depend on how many characters a token stands for in bits,
    as they do in nats per token.
    """
    rates = {'main': bits_per_character(1, text.training, text.alphabet),
             'validation/main': bits_per_character(1, text.validation,
                                                   text.alphabet)}

    def add(entry):
        for place, rate in rates.items():
            if f'{place}/loss' in entry:
                entry[f'{place}/bpc'] = rate * entry[f'{place}/loss']
    return add


def summarise(log, seconds):
    """What is shown of a run.

    Args:
        log: What ``LogReport`` wrote.
        seconds: Of each update of this run.
    """
    last = log[-1]
    return {'updates': last['iteration'],
            'training': last[BITS['training']],
            'validation': last[BITS['validation']],
            'best': min(entry[BITS['validation']] for entry in log),
            'milliseconds': 1e3 * median(seconds) if seconds else None,
            'seconds': last['elapsed_time']}


def print_table(summary, files):
    """A line for each thing that one wants to know of a run.

    Args:
        summary: What :func:`summarise` returned.
        files: What is written where.
    """
    def row(title, value, unit, explanation=''):
        print(f'{title:18}{value:>10} {unit:22}{explanation}'.rstrip())
    print()
    row('training', f'{summary["training"]:.3f}', 'bits per character')
    row('validation', f'{summary["validation"]:.3f}', 'bits per character',
        f'best: {summary["best"]:.3f}')
    if summary['milliseconds']:
        row('time per update', f'{summary["milliseconds"]:.1f}', 'ms',
            'median')
    for name, path in files.items():
        print(f'{name:18}{path}')


def plot_curves(log, title, path):
    """Bits per character against updates, as PNG."""
    # Rank 0 draws; the import would take all ranks a second at the start.
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4.5), layout='constrained')
    axes = figure.subplots()
    updates = [entry['iteration'] for entry in log]
    for (label, key), marker in zip(BITS.items(), 'os', strict=True):
        axes.plot(updates, [entry[key] for entry in log], label=label,
                  marker=marker, markersize=4)
    axes.set_xlabel('updates')
    axes.set_ylabel('bits per character')
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(title)
    figure.savefig(path, dpi=120)
