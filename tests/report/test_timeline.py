"""A timeline shows all events, and nothing in it lies upon another thing."""
import sys
from itertools import pairwise

from chainer_fp8pipe.pipeline.schedules import make_schedule
from chainer_fp8pipe.planning.schedule_time import Costs, Link, simulate
from chainer_fp8pipe.report.events import Event, explain_waits
from chainer_fp8pipe.report.timeline import plot_timeline

import numpy
import pytest
from matplotlib import colors
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..pipeline.measured import as_measured

SHAPES = [('gpipe', 4, 8, 1), ('1f1b', 4, 8, 1), ('zero_bubble', 4, 8, 1),
          ('interleaved', 2, 4, 2), ('interleaved', 4, 12, 4),
          ('zero_bubble', 8, 32, 1), ('gpipe', 1, 1, 1)]


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


def title_of(figure):
    return figure.get_suptitle()


def labels_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def boxes_of(figure):
    """Row, face, start and end of each box, without the rows' ground."""
    return [(round(extent.y0 + extent.height / 2),
             colors.to_hex(collection.get_facecolor()[0]),
             extent.x0, extent.x1)
            for collection in figure.axes[0].collections
            for path in collection.get_paths()
            for extent in [path.get_extents()]
            if colors.to_hex(collection.get_facecolor()[0]) != '#e6e6e6']


@pytest.mark.parametrize('shape', SHAPES)
def test_nothing_lies_upon_another_thing(draw, shape):
    figure = draw(events_of(*shape), 'the title')
    whole = figure.bbox
    (legend,) = figure.legends
    axes = figure.axes[0].get_tightbbox()
    title = figure._suptitle.get_window_extent()
    frame = legend.get_window_extent()
    for part in (axes, title, frame):
        assert whole.x0 <= part.x0 < part.x1 <= whole.x1
        assert whole.y0 <= part.y0 < part.y1 <= whole.y1
    assert frame.y1 <= axes.y0
    assert axes.y1 <= title.y0
    texts = [text.get_window_extent() for text in legend.get_texts()]
    assert not any(one.overlaps(other) for place, one in enumerate(texts)
                   for other in texts[place + 1:])


@pytest.mark.parametrize('shape', SHAPES)
def test_numbers_stand_inside_of_their_boxes(draw, shape):
    figure = draw(events_of(*shape))
    axes = figure.axes[0]
    boxes = [(row, axes.transData.transform([(start, row), (end, row)])[:, 0])
             for row, _, start, end in boxes_of(figure)]
    for text in axes.texts:
        extent = text.get_window_extent()
        assert any(row == text.get_position()[1] and start <= extent.x0
                   and extent.x1 <= end for row, (start, end) in boxes)


@pytest.mark.parametrize('shape', SHAPES[:4] + SHAPES[6:])
def test_every_micro_batch_can_be_read_where_boxes_are_wide(draw, shape):
    _, stages, micro_batches, _ = shape
    events = events_of(*shape)
    figure = draw(events)
    for rank in range(stages):
        shown = sorted(int(text.get_text()) for text in figure.axes[0].texts
                       if text.get_position()[1] == rank)
        assert shown == sorted(
            event.micro_batch for event in events if event.rank == rank
            and event.name in ('forward', 'recompute', 'backward',
                               'backward_weight'))


@pytest.mark.parametrize('shape', SHAPES)
def test_every_event_is_a_box_at_its_time(draw, shape):
    events = [event._replace(start=event.start + 50, end=event.end + 50)
              for event in explain_waits(events_of(*shape))
              if event.name != 'wait']
    expected = sorted((event.rank, event.start - 50, event.end - 50)
                      for event in events)
    found = sorted((row, start, end)
                   for row, _, start, end in boxes_of(draw(events)))
    numpy.testing.assert_allclose(found, expected, atol=1e-9)


def test_the_title_has_the_idle_share(draw):
    events = [Event(0, 'forward', 0, 1, 0, 0), Event(1, 'forward', 1, 4, 0, 1)]
    assert title_of(draw(events)) == 'idle 50.0 %'
    assert title_of(draw(events, '1f1b')) == '1f1b: idle 50.0 %'


def test_everything_has_a_colour_of_its_own(draw):
    names = ['forward', 'recompute', 'backward', 'backward_weight', 'update',
             'send', 'exchange', 'something else']
    events = [Event(0, name, place, place + 1, 0, 0)
              for place, name in enumerate(names)]
    events.append(Event(0, 'receive', len(names), len(names) + 1, 0, 0))
    figure = draw(events)
    assert labels_of(figure) == [
        'forward', 'forward again', 'backward, input half',
        'backward, weight half', 'update', 'stage send and receive',
        'all-reduce', 'something else', 'waiting']
    patches = figure.legends[0].get_patches()
    assert len({patch.get_facecolor() for patch in patches}) == 9
    # A box has the colour that the legend gives it; receives look as sends.
    by_start = [colour for _, colour, _, _ in sorted(
        boxes_of(figure), key=lambda box: box[2])]
    assert by_start[:-1] == [colors.to_hex(patch.get_facecolor())
                             for patch in patches[:-1]]
    assert by_start[-1] == by_start[names.index('send')]
    # Halves differ in print, too.
    assert patches[3].get_hatch()
    assert not patches[2].get_hatch()


def test_a_whole_backward_pass_is_not_called_a_half(draw):
    events = [Event(0, 'backward', 0, 1, 0, 0)]
    assert labels_of(draw(events)) == ['backward', 'waiting']


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
    by_start = [colour for _, colour, _, _ in sorted(
        boxes_of(figure), key=lambda box: box[2])]
    assert by_start[0::2] == by_start[1::2]
    assert len(set(by_start)) == 3


def test_the_first_rank_is_on_top(draw):
    axes = draw([Event(rank, 'forward', 0, 1, 0, rank)
                 for rank in (3, 5)]).axes[0]
    names = sorted((label.get_window_extent().y0, label.get_text())
                   for label in axes.get_yticklabels())
    assert [name for _, name in names] == ['rank 5', 'rank 3']


@pytest.mark.parametrize(('seconds', 'unit', 'scale'), [
    (30, 's', 1), (0.3, 'ms', 1e3), (3e-4, 'µs', 1e6)])
def test_the_unit_fits_the_length(draw, seconds, unit, scale):
    axes = draw([Event(0, 'forward', 5, 5 + seconds, 0, 0)]).axes[0]
    assert axes.get_xlabel() == f'time ({unit})'
    assert axes.get_xlim() == pytest.approx((0, seconds * scale))


@pytest.mark.parametrize('count', [1, 3000])
def test_the_picture_stays_of_a_size_for_a_screen(draw, count):
    figure = draw([Event(0, 'forward', place, place + 1, place, 0)
                   for place in range(count)])
    assert 8 <= figure.get_figwidth() <= 26
    assert figure.get_figheight() <= 3


@pytest.mark.parametrize('short', [0, 1e-3])
def test_a_few_short_events_do_not_make_the_picture_wide(draw, short):
    events = []
    for place in range(12):
        length = short if place % 3 else 1
        events.append(Event(0, 'forward', place, place + length, place, 0))
    assert draw(events).get_figwidth() < 10


def test_a_file_is_written_in_the_format_of_its_name(tmp_path):
    events = events_of('1f1b', 2, 3, 1)
    plot_timeline(events, tmp_path / 'timeline.png', '1f1b')
    plot_timeline(events, str(tmp_path / 'timeline.svg'))
    assert (tmp_path / 'timeline.png').read_bytes()[1:4] == b'PNG'
    assert '<svg' in (tmp_path / 'timeline.svg').read_text()


@pytest.mark.parametrize('events', [[], [Event(0, 'forward', 1, 1, 0, 0)]])
def test_there_must_be_something_to_draw(events, tmp_path):
    with pytest.raises(ValueError, match='no events'):
        plot_timeline(events, tmp_path / 'timeline.png')


def test_without_matplotlib_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(ImportError, match='pip install matplotlib'):
        plot_timeline([Event(0, 'forward', 0, 1)], tmp_path / 'timeline.png')
