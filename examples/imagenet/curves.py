"""The picture of a training run."""
import json


def plot_log(log, path, title):
    """Loss, error, learning rate and speed against epochs, as PNG.

    Args:
        log: The file that ``LogReport`` wrote.
        path: Of the picture.
        title: Above all.
    """
    with open(log) as file:
        entries = json.load(file)
    # Rank 0 draws; the import would take all ranks a second at the start.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    figure = Figure(figsize=(11, 7), layout='constrained')
    (loss, error), (rate, speed) = figure.subplots(2, 2, sharex=True)
    for axes, lines in (
            (loss, {'training': 'main/loss', 'validation': 'val/loss'}),
            (error, {'training, top 1': 'main/top1',
                     'validation, top 1': 'val/top1',
                     'validation, top 5': 'val/top5'}),
            (rate, {'learning rate': 'lr'}),
            (speed, {'images per second': 'images/s'})):
        for (label, key), marker in zip(lines.items(), 'os^', strict=False):
            points = [(entry['epoch_detail'], entry[key])
                      for entry in entries if key in entry]
            axes.plot([epoch for epoch, _ in points],
                      [100 * (1 - value) if axes is error else value
                       for _, value in points],
                      label=label, marker=marker, markersize=4)
        axes.grid(alpha=0.3, which='both')
    loss.set_ylabel('loss')
    error.set_ylabel('error [%]')
    rate.set_ylabel('learning rate')
    speed.set_ylabel('images/s')
    for axes in (loss, error):
        axes.legend()
    for axes in (error, rate, speed):
        axes.set_ylim(bottom=0)
    for axes in (rate, speed):
        axes.set_xlabel('epoch')
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
