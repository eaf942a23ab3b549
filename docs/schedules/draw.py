"""Draws the pictures of docs/pipeline.rst:  python docs/schedules/draw.py"""
import pathlib

from chainer_fp8pipe.pipeline.schedules import Kind, make_schedule
from chainer_fp8pipe.report.stream import Event
from chainer_fp8pipe.report.svg import picture


def events_of(schedule, second):
    """What the ranks do when, if messages take no time.

    Args:
        schedule: Of all ranks.
        second: Seconds of a forward pass; a half of backward takes as long.
    """
    now, left = [0.0] * schedule.stages, list(map(list, schedule.actions))
    # What other chunks need, and when it is there.
    ready = {(Kind.FORWARD, number, -1): 0.0
             for number in range(schedule.micro_batches)} | {
        (Kind.BACKWARD, number, schedule.last_chunk + 1): 0.0
        for number in range(schedule.micro_batches)}
    events = []
    while any(left):
        for rank, actions in enumerate(left):
            while actions:
                kind, number, chunk = actions[0]
                way, further = ((Kind.FORWARD, -1) if kind is Kind.FORWARD
                                else (Kind.BACKWARD, 1))
                if kind is not Kind.BACKWARD_WEIGHT:
                    if (way, number, chunk + further) not in ready:
                        break           # until another rank has come so far
                    now[rank] = max(now[rank],
                                    ready[way, number, chunk + further])
                start = now[rank]
                now[rank] += second * (2 if kind is Kind.BACKWARD else 1)
                ready.setdefault((way, number, chunk), now[rank])
                events.append(Event(
                    rank, kind.value.replace('_input', ''), start, now[rank],
                    number, chunk))
                del actions[0]
    return events


if __name__ == '__main__':
    for name in ('1f1b', 'zero_bubble'):   # those that docs/pipeline.rst shows
        pathlib.Path(__file__).with_name(f'{name}.svg').write_text(picture(
            events_of(make_schedule(name, 4, 8, 1), 0.01), name))
