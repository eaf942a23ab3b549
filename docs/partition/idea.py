"""Draws ``idea.png``: what each of two ranks computes of a forward pass."""
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

LINES = ['h = self.embed(x)', 'h = self.block1(h)', 'h = self.block2(h)',
         'y = F.linear(h, self.embed.W)',
         'return F.softmax_cross_entropy(y, t)']
OWNER = [0, 0, 1, 1, 1]
BLUE, PURPLE, GREY = '#3366ab', '#9e2973', '#808080'
WIDTH, HEIGHT, APART = 3.3, 0.3, 0.42
LEFT = 0.2, 4.5
TOP, BOTTOM = 3.0, 0.8


def box(corner, width, height, real):
    return FancyBboxPatch(
        corner, width, height, boxstyle='round,pad=0,rounding_size=0.05',
        facecolor=BLUE if real else 'white', linewidth=0 if real else 1,
        edgecolor=GREY, linestyle='-' if real else '--')


figure = Figure(figsize=(8, 3.6))
axes = figure.add_axes((0, 0, 1, 1))
axes.set_xlim(0, 8)
axes.set_ylim(0, 3.6)
axes.axis('off')
for rank, x in enumerate(LEFT):
    axes.text(x, TOP + 0.36, f'rank {rank}', fontsize=12, weight='bold')
    axes.text(x, TOP + 0.13, "runs all of the model's own forward(x, t)",
              fontsize=9, color=GREY)
    for number, line in enumerate(LINES):
        real = OWNER[number] == rank
        y = TOP - HEIGHT - APART * number
        axes.add_patch(box((x, y), WIDTH, HEIGHT, real))
        axes.text(x + 0.12, y + HEIGHT / 2, line, va='center', fontsize=9,
                  family='monospace', color='white' if real else GREY)
y = TOP - APART - HEIGHT / 2
ends = LEFT[0] + WIDTH + 0.05, LEFT[1] - 0.05
for turn, height, text, style in ((1, 0.06, 'h', '-'),
                                  (-1, -0.06, 'its gradient', '--')):
    axes.annotate('', (ends[turn > 0], y + height),
                  (ends[turn < 0], y + height),
                  arrowprops={'arrowstyle': '->', 'color': PURPLE,
                              'linestyle': style, 'linewidth': 1.5})
    axes.text(sum(ends) / 2, y + 3.2 * height, text, ha='center',
              va='center', fontsize=9, color=PURPLE)
for x, real, text in (
        (LEFT[0], True, 'computed here, with real arrays'),
        (3.1, False, 'computed on the other rank; here a placeholder, without '
         'data')):
    axes.add_patch(box((x, BOTTOM - 0.36), 0.22, 0.16, real))
    axes.text(x + 0.32, BOTTOM - 0.28, text, va='center', fontsize=9)
axes.text(LEFT[0], 0.12, 'Both ranks have the batch (x, t).  Both have '
          'embed.W, and sum its gradients.', fontsize=9, color=GREY)
figure.savefig(Path(__file__).with_name('idea.png'), dpi=130)
