"""Draws the pictures of ``architecture.rst``: ways through the package.

What is drawn stands in ``architecture/ways.json``: for each picture its boxes
in their order, and for each box the module (``in``, without the package's
name) and the class or function (``name``), or a ``file``; ``where`` this runs,
which is the colour; and what it ``does``.  A box is the further to the right
the lower its floor is (``pyproject.toml``, the layers).
"""
import json
import re
import textwrap
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).parent
COLOURS = ['#3366ab', '#9e2973', '#2e7d5b', '#b06a1e']
GREY = '#606060'
WIDTH = 7.6             # inches, of the picture
BOX, HEIGHT, APART = 2.75, 0.37, 0.55
STEP = 0.1              # inches to the right for each floor
TOP = 0.5               # inches above the first box: the legend
LETTERS = 44            # in a line beside a box


def floors():
    """The floor of each room, counted from the top."""
    text = (HERE.parent / 'pyproject.toml').read_text()
    layers = text.partition('\nlayers = [')[2].partition(']')[0]
    return {room: number
            for number, layer in enumerate(re.findall(r'"(.*)"', layers))
            for room in re.findall(r'chainer_fp8pipe\.(\w+)', layer)}


def labels(box):
    """The two lines in a box: its file, and what of it."""
    if 'file' in box:
        return box['file'], 'compiled code'
    return box['in'].replace('.', '/') + '.py', box['name']


def draw(way, depth):
    """Draws one picture; where that is."""
    boxes = way['boxes']
    height = TOP + APART * len(boxes)
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0, height)
    axes.axis('off')
    places = list(dict.fromkeys(box['where'] for box in boxes))
    colours = dict(zip(places, COLOURS, strict=False))
    for number, place in enumerate(places):
        x = 0.15 + 1.8 * number
        axes.add_patch(FancyBboxPatch(
            (x, height - 0.3), 0.18, 0.13, boxstyle='round,pad=0',
            facecolor=colours[place], linewidth=0))
        axes.text(x + 0.26, height - 0.24, place, va='center', fontsize=9)
    beside = 0.3 + BOX + STEP * max(depth.values())
    before = None
    for number, box in enumerate(boxes):
        path, name = labels(box)
        x = 0.15 + STEP * depth[path.partition('/')[0]]
        y = height - TOP - APART * number - HEIGHT
        axes.add_patch(FancyBboxPatch(
            (x, y), BOX, HEIGHT, linewidth=0, facecolor=colours[box['where']],
            boxstyle='round,pad=0,rounding_size=0.05'))
        axes.text(x + 0.1, y + 0.73 * HEIGHT, path, va='center', fontsize=7.5,
                  color='white', family='monospace')
        axes.text(x + 0.1, y + 0.29 * HEIGHT, name, va='center', fontsize=9,
                  color='white', weight='bold')
        axes.text(beside, y + HEIGHT / 2, textwrap.fill(box['does'], LETTERS),
                  va='center', fontsize=9)
        if before is not None:
            right = max(before, x) + 0.3
            axes.annotate('', (right, y + HEIGHT), (right, y + APART),
                          arrowprops={'arrowstyle': '->', 'color': GREY})
        before = x
    path = HERE / 'architecture' / way['picture']
    figure.savefig(path, dpi=120, metadata={'Software': None})
    return path


if __name__ == '__main__':
    for way in json.loads((HERE / 'architecture/ways.json').read_text()):
        print(draw(way, floors()))
