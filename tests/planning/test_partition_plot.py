"""A table and a picture of a cut say who does how much, and can be read."""
import os
import re
import sys
import tempfile
from dataclasses import replace
from types import SimpleNamespace

from chainer_fp8pipe import partition
from chainer_fp8pipe.planning import PartitionPlan, plot_plan
from chainer_fp8pipe.planning.calls import Value
from chainer_fp8pipe.planning.partition_plan import Cut, Predicted
from chainer_fp8pipe.planning.partition_plot import table

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.ranks import on_ranks

FLOAT = numpy.dtype('f')


def cut(stages, chunks=1, limit=2e9, ties=1, again=False, replicas=1):
    """What a partition knows of a cut into that many parts."""
    parts = stages * chunks
    order = tuple((f'/predictor/encoder/{place}/self_attention/query/W',)
                  for place in range(parts))
    plan = PartitionPlan(
        order, tuple(Cut(group[0]) for group in order[1:]),
        stages, (again,) * parts, 8, 'interleaved',
        Predicted(.25, tuple(.01 + .001 * part for part in range(parts)),
                  tuple(1e9 + 1e8 * stage for stage in range(stages)),
                  (4096.,) * (parts - 1)))
    used = {part: [*order[part]] for part in range(parts)}
    tied = {}
    for number in range(ties if stages > 1 else 0):
        name = f'/predictor/words/{number}/W'
        parts_of = [number % 2, parts - 1]
        for part in parts_of:
            used[part].append(name)
        tied[name] = tuple(part % stages for part in parts_of)
    return SimpleNamespace(
        plan=plan, used=used, ties=tied, title='Translator', limit=limit,
        parameter_bytes=lambda name: 3e6,
        crossing=[[('_ + _', Value((2, 32, 128), FLOAT, True))] * 5
                  for _ in range(parts - 1)],
        grid=SimpleNamespace(replicas=replicas, placement=SimpleNamespace(
            ranks=[[stage + stages * replica for replica in range(replicas)]
                   for stage in range(stages)])))


FIRST = ('/predictor/encoder/{}/self_attention/query/W').format
PARTS = '_ + _ 2x32x128, _ + _ 2x32x128 and 3 more'


@pytest.mark.parametrize(('options', 'head', 'rows', 'notes'), [
    ({'stages': 3}, '3 stages', [
        ['0', '0', '30 %', '6 MB', '1 GB', f'164 kB: {PARTS}', FIRST(0)],
        ['1', '1', '33 %', '3 MB', '1.1 GB', f'164 kB: {PARTS}', FIRST(1)],
        ['2', '2', '36 %', '6 MB', '1.2 GB', FIRST(2)]],
     ['/predictor/words/0/W is on stages 0 and 2, which sum its gradient']),
    # Chunks of one rank are told apart, and all replicas named.
    ({'stages': 1, 'chunks': 2, 'replicas': 2, 'again': True},
     '1 stage x 2 replicas', [
        ['0.0', '0 1', '48 %', '3 MB', '1 GB', f'164 kB: {PARTS}',
         f'{FIRST(0)} (again)'],
        ['0.1', '0 1', '52 %', '3 MB', '1 GB', f'{FIRST(1)} (again)']],
     ['(again): keeps its inputs only, and runs forward twice'])])
def test_a_line_says_who_does_how_much_and_what_crosses(
        options, head, rows, notes):
    title, names, *lines = table(cut(**options)).splitlines()
    assert title.startswith(
        f'Translator: {head}, interleaved with 8 micro-batches, balance 0.9')
    assert title.endswith(', 250 ms a step predicted')
    columns = re.split(' {2,}', names)
    assert columns == ['stage', 'rank', 'time', 'parameters', 'memory',
                       'sends on', 'first parameter']
    assert [re.split(' {2,}', line) for line in lines[:len(rows)]] == rows
    for line, row in zip(lines, rows, strict=False):
        for place in (0, 3, 4, -1):     # a column begins below its name
            start = names.index(columns[place])
            assert line[start:].startswith(row[place])
    assert lines[len(rows):] == notes


def test_a_plan_without_predictions_has_a_table():
    """Somebody may have written it by hand."""
    part = cut(3)
    part.plan = replace(part.plan, predicted=Predicted())
    title, _, line, *_ = table(part).splitlines()
    assert title == 'Translator: 3 stages, interleaved with 8 micro-batches'
    assert line.split()[:4] == ['0', '0', '6', 'MB']


@pytest.fixture
def draw(monkeypatch):
    """Draws, and returns the figure instead of a file."""
    figures = []
    monkeypatch.setattr(Figure, 'savefig',
                        lambda self, path, **options: figures.append(self))

    def drawn(*args, **options):
        plot_plan(*args, 'unused.png', **options)
        figure = figures.pop()
        FigureCanvasAgg(figure).draw()
        return figure
    return drawn


def texts(figure):
    return [figure._suptitle, figure._supxlabel, *(
        text for plot in figure.axes for text in (
            *plot.texts, plot._left_title, *plot.get_yticklabels()))]


def said(figure):
    return [line for text in texts(figure)
            for line in text.get_text().split('\n')]


def panels(figure):
    """By title: the lengths of the bars, relative to the longest."""
    found = {}
    for bars in (bars for plot in figure.axes for bars in plot.containers):
        lengths = [bar.get_width() for bar in bars]
        found[bars.get_label()] = [one / max(lengths) for one in lengths]
    return found


MUCH = {'ties': 6, 'again': True, 'replicas': 5}


@pytest.mark.parametrize(('shape', 'options'), [
    ((1, 1), {}), ((3, 1), {}), ((8, 1), MUCH), ((4, 2), MUCH)])
def test_nothing_lies_upon_another_thing(draw, shape, options):
    figure = draw(cut(*shape, **options))
    extents = [(text.get_text(), text.get_window_extent())
               for text in texts(figure) if text.get_text()]
    for place, (text, one) in enumerate(extents):
        assert one.x0 >= 0, text
        assert one.y0 >= 0, text
        assert one.x1 <= figure.bbox.x1, text
        assert one.y1 <= figure.bbox.y1, text
        for other, another in extents[place + 1:]:
            assert not one.overlaps(another), (text, other)


def test_bars_are_as_long_as_what_they_stand_for(draw):
    figure = draw(cut(3))
    found = panels(figure)
    assert found == {name: pytest.approx(lengths) for name, lengths in {
        'share of the time': [10 / 12, 11 / 12, 1], 'parameters': [1, .5, 1],
        'memory, predicted': [10 / 12, 11 / 12, 1]}.items()}
    assert {'30 %', '33 %', '36 %', '6 MB', '3 MB', '1 GB', '1.1 GB',
            'limit 2 GB'} <= {*said(figure)}
    crossing = '↓ 164 kB: ' + ', '.join(['_ + _ 2x32x128'] * 3) + ' and 2 more'
    assert said(figure).count(crossing) == 2
    # A rank's memory stands once for all its chunks.
    figure = draw(cut(2, 2))
    assert panels(figure)['memory, predicted'] == pytest.approx(
        [1 / 1.1, 1, 0, 0])
    assert [text.split('   ')[0] for text in said(figure)
            if text.startswith('stage ')] == [
                'stage 0.0', 'stage 1.0', 'stage 0.1', 'stage 1.1']


def test_parameters_of_several_stages_are_named(draw):
    part = cut(4)
    part.used[2].append('/predictor/words/0/W')
    assert '/predictor/words/0/W is on stage 0, stage 2, stage 3' in said(
        draw(part))
    assert 'and 2 more' in said(draw(cut(4, ties=8)))


def test_a_plan_alone_shows_what_it_knows(draw):
    figure = draw(cut(3).plan)
    assert list(panels(figure)) == ['share of the time', 'memory, predicted']
    assert said(figure).count('↓ 4.1 kB') == 2
    assert not any('limit' in text for text in said(figure))
    assert 'limit 1.5 GB' in said(draw(cut(3).plan, memory=1.5e9))
    figure = draw(PartitionPlan((('/a/W',), ('/b/W',)), (Cut('/b/W'),), 2,
                                (False, False), 4, '1f1b'))
    assert not panels(figure)
    assert {'/a/W', '/b/W', 'stage 1',
            '2 stages, 1f1b with 4 micro-batches'} <= {*said(figure)}


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(ImportError, match='pip install matplotlib'):
        plot_plan(cut(2), 'unused.png')


class Tied(chainer.Chain):
    def __init__(self):
        super().__init__(words=L.EmbedID(7, 8), inner=L.Linear(8, 8))

    def forward(self, x, t):
        h = F.relu(self.inner(self.words(x)))
        return F.softmax_cross_entropy(F.linear(h, self.words.W), t)


@on_ranks(2)
def test_a_cut_model_is_written_as_a_png(comm):
    x = numpy.arange(6, dtype='i')
    model = partition(Tied(), (x, x), comm, memory='1 GB')
    assert model.partition.limit == 1e9
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'plan.png')
        plot_plan(model, path)
        with open(path, 'rb') as file:
            assert file.read(8) == b'\x89PNG\r\n\x1a\n'
        assert os.path.getsize(path) > 10_000
