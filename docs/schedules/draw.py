"""Draws the pictures of docs/pipeline.rst:  python docs/schedules/draw.py"""
import pathlib

from chainer_fp8pipe.pipeline.schedules import SCHEDULES, make_schedule
from chainer_fp8pipe.planning.schedule_time import Costs, simulate
from chainer_fp8pipe.report.timeline import picture

for name in SCHEDULES:
    chunks = 2 if name == 'interleaved' else 1
    timeline = simulate(make_schedule(name, 4, 8, chunks),
                        [Costs(*3 * [0.01 / chunks])] * (4 * chunks))
    pathlib.Path(__file__).with_name(f'{name}.svg').write_text(
        picture(timeline.events, name))
