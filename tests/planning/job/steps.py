"""Predicted steps of made-up jobs."""
from chainer_fp8pipe.planning.job.choices import Choices, Wanted
from chainer_fp8pipe.planning.job.configuration import Configuration
from chainer_fp8pipe.planning.job.job_profile import Figure
from chainer_fp8pipe.planning.job.step import StepModel

from .jobs import SAMPLES, figures

#: Seconds of forward and backward of eight samples, in four layers.
PASSES = .4
MODEL = figures(*[PASSES / 4] * 4, parameters=4_000_000,
                update=Figure(.02), rest=Figure(.003))
BYTES = 4 * 4_000_000


def step(profile, each=SAMPLES, **way):
    """A step of so many samples for each rank."""
    way = {'replicas': profile.ranks, **way}
    return StepModel(profile, each * profile.ranks).predict(
        Configuration(**way))


def seconds(profile, **way):
    return step(profile, **way).seconds.value


def cut(profile, stages, micro_batches, schedule, batch):
    """A pipeline with the best cut."""
    found, _ = Choices(profile, Wanted(batch)).cut(
        stages, profile.ranks // stages, micro_batches, schedule)
    return Configuration(profile.ranks // stages, stages, micro_batches,
                         found)
