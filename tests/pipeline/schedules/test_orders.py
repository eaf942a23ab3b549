"""The tables in the documentation are what the schedules do."""
import inspect
import re

from chainer_fp8pipe.pipeline.schedules import orders
from chainer_fp8pipe.pipeline.schedules.schedule import (
    forward_schedule,
    make_schedule,
)
from chainer_fp8pipe.planning.schedules.simulator import UNIT, simulate

import pytest

SCHEDULES = {
    'gpipe': make_schedule('gpipe', 4, 4),
    'one_forward_one_backward': make_schedule('1f1b', 4, 4),
    'interleaved': make_schedule('interleaved', 4, 4, 2),
    'zero_bubble': make_schedule('zero_bubble', 4, 4),
    'forwards': forward_schedule(4, 4),
}


def rows_of(schedule):
    """Cells of two characters, one row per rank."""
    timeline = simulate(schedule, [UNIT] * (schedule.last_chunk + 1))
    halved = any(event.name == 'backward_weight'
                 for event in timeline.events)
    letters = {'forward': 'FG', 'backward': 'I' if halved else 'BC',
               'backward_weight': 'W'}
    rows = [['..'] * round(timeline.step_time)
            for _ in range(schedule.stages)]
    for event in timeline.events:
        letter = letters[event.name][event.chunk // schedule.stages]
        start, end = round(event.start), round(event.end)
        rows[event.rank][start:end] = [
            f'{letter}{event.micro_batch}', *['--'] * (end - start - 1)]
    return rows


@pytest.mark.parametrize('name', SCHEDULES)
def test_the_table_of_a_schedule_is_its_timeline(name):
    text = inspect.getdoc(getattr(orders, name))
    rows = [re.findall('..', cells.replace(' ', ''))
            for cells in re.findall(r'^ +\d \| (.*)$', text, re.MULTILINE)]
    assert rows == rows_of(SCHEDULES[name])
