"""Draws the pictures of docs/pipeline.rst:  python docs/schedules/draw.py"""
import pathlib

from chainer_fp8pipe.pipeline.schedules import SCHEDULES, Kind, make_schedule
from chainer_fp8pipe.report.stream import Event
from chainer_fp8pipe.report.timeline import picture


def events_of(schedule, second):
    """What the ranks do when, if messages take no time.

    Args:
        schedule: Of all ranks.
        second: Seconds of a forward pass; a half of backward takes as long.
    """
    now, left = [0.0] * schedule.stages, list(map(list, schedule.actions))
    sent, events = {}, []
    while any(left):
        for rank, actions in enumerate(left):
            while actions:
                action = actions[0]
                way, _, what = action.kind.value.partition('_')
                message = what, action.boundary, action.micro_batch
                if way == 'receive':
                    if message not in sent:
                        break           # until another rank has come so far
                    now[rank] = max(now[rank], sent[message])
                elif way == 'send':
                    sent[message] = now[rank]
                else:
                    start = now[rank]
                    now[rank] += second * (
                        2 if action.kind is Kind.BACKWARD else 1)
                    events.append(Event(
                        rank, action.kind.value.replace('_input', ''), start,
                        now[rank], action.micro_batch, action.chunk))
                del actions[0]
    return events


if __name__ == '__main__':
    for name in SCHEDULES:
        chunks = 2 if name == 'interleaved' else 1
        pathlib.Path(__file__).with_name(f'{name}.svg').write_text(picture(
            events_of(make_schedule(name, 4, 8, chunks), 0.01 / chunks),
            name))
