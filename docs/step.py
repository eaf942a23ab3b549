"""Draws step.png, the picture of the README, from a result of

    python benchmarks/training.py steps

as benchmarks/training_steps.txt has it:  python docs/step.py
"""
import pathlib
import re

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot

FOLDER = pathlib.Path(__file__).parent
# What the result calls it, what the picture does.
BARS = {
    'PyTorch DDP, gloo, float32': 'PyTorch DDP, float32 (gloo)',
    'PyTorch DDP, gloo, fp16 hook': 'PyTorch DDP, its fp16 hook',
    'float32': 'float32',
    'fp8': 'fp8',
    'fp8, wait in next forward': "fp8, overlap='next_forward'",
    'int4, wait in next forward': "int4, overlap='next_forward'",
}


def results(text):
    """Median, least and most milliseconds of each row, by its label."""
    rows = re.findall(r'^(\S.*?) {2,}([\d.]+) +([\d.]+) - ([\d.]+) ', text,
                      re.MULTILINE)
    return {label: tuple(map(float, times)) for label, *times in rows}


def draw(found, file):
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout='constrained')
    rows = [found[name] for name in BARS]
    medians = [median for median, _, _ in rows]
    bars = axes.barh(
        list(BARS.values()), medians, height=0.7, ecolor='black', capsize=3,
        xerr=[[median - least for median, least, _ in rows],
              [most - median for median, _, most in rows]],
        color=['tab:blue' if 'fp8' in name or 'int4' in name else 'tab:gray'
               for name in BARS])
    axes.bar_label(bars, [f'{median:.0f} ms' for median in medians],
                   padding=6)
    figure.suptitle(
        f'fp8 cuts a training step from {found["float32"][0]:.0f} to '
        f'{found["fp8"][0]:.0f} ms where links have 500 Mbit/s',
        x=0.01, horizontalalignment='left')
    axes.set_xlim(0, 1.15 * max(most for _, _, most in rows))
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    axes.invert_yaxis()
    figure.savefig(file, dpi=150)


if __name__ == '__main__':
    draw(results((FOLDER / 'benchmarks' / 'training_steps.txt').read_text()),
         FOLDER / 'step.png')
