"""What all ranks do at once lasts until the last one is through."""
import dataclasses

from chainer_fp8pipe.planning.cores import Cores
from chainer_fp8pipe.planning.job.all_at_once import (
    per_rank,
    slowest,
    together,
)

import pytest

from .jobs import figures, job

MODEL = figures(1.0)


def test_the_last_rank_is_slow_by_itself_or_by_chance():
    assert slowest(job(MODEL, range(3))) == 1
    profile = dataclasses.replace(
        job(MODEL, range(3), speeds=(1.0, 2.0, 1.0)), straggling=1.1)
    assert slowest(profile) == pytest.approx(2.2)


def test_the_fullest_cores_are_waited_for():
    profile = job(MODEL, (0, 0, 0), Cores((0, 0, 1), 1.0, (1.8, 1.0)),
                  speeds=(1.0, 1.0, 3.0))
    assert together(profile, 2.0) == pytest.approx(2 * 3 * 1.8)


def test_ranks_on_a_core_get_their_share_of_it():
    profile = job(MODEL, (0, 0, 0), Cores((0, 0, 1), 1.0, (2.0, 1.0)))
    assert per_rank(profile) == pytest.approx((.5 + .5 + 1) / 3)
    alone = job(MODEL, (0, 0), Cores((0, 1), 1.25, (1.0, 1.0)))
    assert per_rank(alone) == pytest.approx(1 / 1.25)
