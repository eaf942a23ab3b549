"""A picture shows all events, and nothing in it lies upon another thing."""
import sys
from itertools import combinations, pairwise

from chainer_fp8pipe.pipeline.schedules import make_schedule
from chainer_fp8pipe.planning.schedule_time import Costs, Link, simulate
from chainer_fp8pipe.report.events import Event, explain_waits
from chainer_fp8pipe.report.record import PHASES
from chainer_fp8pipe.report.timeline import look_of_name, plot_timeline

import numpy
import pytest
from matplotlib import colors
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..pipeline.measured import as_measured

SHAPES = [('gpipe', 4, 8, 1), ('1f1b', 4, 8, 1), ('interleaved', 4, 12, 4),
          ('zero_bubble', 8, 32, 1), ('gpipe', 1, 1, 1)]

# Machado, Oliveira, Fernandes 2009, severity 1, for linear RGB.
SIGHT = {
    'protanopia': [[0.152286, 1.052583, -0.204868],
                   [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    'deuteranopia': [[0.367322, 0.860646, -0.227968],
                     [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    'all colours': numpy.eye(3)}


def lab(colour, sight):
    """CIELAB of an sRGB colour as somebody with that sight sees it."""
    colour = numpy.array(colour)
    linear = numpy.where(colour <= 0.04045, colour / 12.92,
                         ((colour + 0.055) / 1.055) ** 2.4)
    seen = numpy.clip(numpy.array(SIGHT[sight]) @ linear, 0, 1)
    xyz = numpy.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722],
                       [0.0193, 0.1192, 0.9505]]) @ seen
    x, y, z = (numpy.cbrt(part) if part > 0.008856
               else 7.787 * part + 16 / 116
               for part in xyz / [0.9505, 1, 1.089])
    return numpy.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize('sight', SIGHT)
def test_the_colour_blind_tell_phases_apart(sight):
    looks = {name: look_of_name(name) for name in (*PHASES, 'bucket', 'wait')}
    # 2.3 is a difference that is just seen; a send looks as a receive does.
    assert min(numpy.linalg.norm(lab(one, sight) - lab(other, sight))
               for one, other in combinations(
                   {look.colour for look in looks.values()}, 2)) > 9
    assert len({*looks.values()}) == len(looks) - 1
    assert looks['other'].label == 'other'


def events_of(name, stages, micro_batches, chunks):
    schedule = make_schedule(name, stages, micro_batches, chunks)
    return as_measured(schedule, simulate(
        schedule, [Costs(1.0, 1.1, 0.9, 0.8)] * (stages * chunks),
        Link(0.1, 1.0, [0.1] * schedule.last_chunk, overlapped=False)))


@pytest.fixture
def draw(monkeypatch):
    """Draws, and returns the figure instead of a file."""
    figures = []
    monkeypatch.setattr(Figure, 'savefig',
                        lambda self, path, **options: figures.append(self))

    def drawn(events, title=None):
        plot_timeline(events, 'unused.png', title)
        figure = figures.pop()
        FigureCanvasAgg(figure).draw()
        return figure

    return drawn


def labels_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def boxes_of(figure):
    """Row, face, start and end of each box, without the rows' ground."""
    return sorted(((round(extent.y0 + extent.height / 2),
                    colors.to_hex(collection.get_facecolor()[0]),
                    extent.x0, extent.x1)
                   for collection in figure.axes[0].collections
                   for path in collection.get_paths()
                   for extent in [path.get_extents()]
                   if colors.to_hex(collection.get_facecolor()[0])
                   != '#e6e6e6'), key=lambda box: box[2])


@pytest.mark.parametrize('shape', SHAPES)
def test_nothing_lies_upon_another_thing(draw, shape):
    events = [event._replace(start=event.start + 50, end=event.end + 50)
              for event in events_of(*shape)]
    figure = draw(events, 'the title')
    whole, (legend,), axes = figure.bbox, figure.legends, figure.axes[0]
    picture, title, frame = (
        axes.get_tightbbox(), figure._suptitle.get_window_extent(),
        legend.get_window_extent())
    for part in picture, title, frame:
        assert whole.x0 <= part.x0 < part.x1 <= whole.x1
        assert whole.y0 <= part.y0 < part.y1 <= whole.y1
    assert frame.y1 <= picture.y0
    assert picture.y1 <= title.y0
    texts = [text.get_window_extent() for text in legend.get_texts()]
    assert not any(one.overlaps(other)
                   for one, other in combinations(texts, 2))
    # Each event is a box at its time, and numbers are inside of theirs.
    boxes = boxes_of(figure)
    numpy.testing.assert_allclose(
        sorted((row, start, end) for row, _, start, end in boxes),
        sorted((event.rank, event.start - 50, event.end - 50)
               for event in explain_waits(events) if event.name != 'wait'),
        atol=1e-9)
    edges = [(row, axes.transData.transform([(start, row), (end, row)])[:, 0])
             for row, _, start, end in boxes]
    for text in axes.texts:
        extent = text.get_window_extent()
        assert any(row == text.get_position()[1] and start <= extent.x0
                   and extent.x1 <= end for row, (start, end) in edges)
    if shape not in SHAPES[2:4]:        # boxes are wide
        assert sorted((text.get_position()[1], int(text.get_text()))
                      for text in axes.texts) == sorted(
            (event.rank, event.micro_batch) for event in events
            if event.name in ('forward', 'recompute', 'backward',
                              'backward_weight'))


def test_the_title_has_the_idle_share_and_the_first_rank_is_on_top(draw):
    events = [Event(3, 'forward', 0, 1, 0, 0), Event(5, 'forward', 1, 4, 0, 1)]
    assert draw(events).get_suptitle() == 'idle 50.0 %'
    figure = draw(events, '1f1b')
    assert figure.get_suptitle() == '1f1b: idle 50.0 %'
    names = sorted((label.get_window_extent().y0, label.get_text())
                   for label in figure.axes[0].get_yticklabels())
    assert [name for _, name in names] == ['rank 5', 'rank 3']


def test_everything_has_a_colour_of_its_own(draw):
    names = ['forward', 'recompute', 'backward', 'backward_weight', 'update',
             'send', 'exchange', 'something else', 'receive']
    figure = draw([Event(0, name, place, place + 1, 0, 0)
                   for place, name in enumerate(names)])
    assert labels_of(figure) == [
        'forward', 'forward again', 'backward, input half',
        'backward, weight half', 'update', 'stage send and receive',
        'all-reduce', 'something else', 'waiting']
    patches = figure.legends[0].get_patches()
    assert len({patch.get_facecolor() for patch in patches}) == 9
    # A box has the colour that the legend gives it; receives look as sends.
    by_start = [colour for _, colour, _, _ in boxes_of(figure)]
    assert by_start[:-1] == [colors.to_hex(patch.get_facecolor())
                             for patch in patches[:-1]]
    assert by_start[-1] == by_start[names.index('send')]
    # Halves differ in print, too; a whole pass is not called a half.
    assert patches[3].get_hatch()
    assert not patches[2].get_hatch()
    assert labels_of(draw([Event(0, 'backward', 0, 1, 0, 0)])) == [
        'backward', 'waiting']


def test_chunks_have_shades_the_first_being_the_darkest(draw):
    """Ranks 0 and 1 with chunks 0, 2, 4 and 1, 3, 5."""
    figure = draw([Event(chunk % 2, 'forward', chunk, chunk + 1, 0, chunk)
                   for chunk in range(6)])
    assert labels_of(figure) == [
        'forward, chunk 1 of 3', 'forward, chunk 2 of 3',
        'forward, chunk 3 of 3', 'waiting']
    shades = [sum(patch.get_facecolor()[:3])
              for patch in figure.legends[0].get_patches()[:3]]
    assert all(darker + 0.2 < lighter for darker, lighter in pairwise(shades))
    by_start = [colour for _, colour, _, _ in boxes_of(figure)]
    assert by_start[0::2] == by_start[1::2]
    assert len(set(by_start)) == 3


@pytest.mark.parametrize(('lengths', 'unit', 'scale', 'widest'), [
    ([30], 's', 1, 10), ([0.3], 'ms', 1e3, 10), ([3e-4], 'µs', 1e6, 10),
    ([1] * 3000, 's', 1, 26), ([1, 0, 0] * 4, 's', 1, 10),
    ([1, 1e-3, 1e-3] * 4, 's', 1, 10)])     # few short ones do not count
def test_unit_and_size_fit_the_events(draw, lengths, unit, scale, widest):
    start = 5.0
    events = []
    for place, length in enumerate(lengths):
        events.append(Event(0, 'forward', start, start + length, place, 0))
        start += max(length, 1e-9)
    figure = draw(events)
    assert figure.axes[0].get_xlabel() == f'time ({unit})'
    assert figure.axes[0].get_xlim() == pytest.approx(
        (0, (events[-1].end - 5) * scale))
    assert 8 <= figure.get_figwidth() <= widest
    assert figure.get_figheight() <= 3


def test_a_file_is_written_in_the_format_of_its_name(tmp_path, monkeypatch):
    events = events_of('1f1b', 2, 3, 1)
    plot_timeline(events, tmp_path / 'timeline.png', '1f1b')
    plot_timeline(events, str(tmp_path / 'timeline.svg'))
    assert (tmp_path / 'timeline.png').read_bytes()[1:4] == b'PNG'
    assert '<svg' in (tmp_path / 'timeline.svg').read_text()
    for nothing in [], [Event(0, 'forward', 1, 1, 0, 0)]:
        with pytest.raises(ValueError, match='no events'):
            plot_timeline(nothing, tmp_path / 'timeline.png')
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(ImportError, match='pip install matplotlib'):
        plot_timeline(events, tmp_path / 'timeline.png')
