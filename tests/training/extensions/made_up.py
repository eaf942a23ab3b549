"""A clock that stands still until told otherwise, and plans without a job."""
from chainer_fp8pipe.planning.job_plan import Configuration, JobPlan


class Clock:
    """Seconds that pass because a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds


def plan_for(ranks, parts, spread=0.1, batch=8, **choice):
    """A plan for so many ranks with these predicted seconds by part."""
    configuration = Configuration(**{'replicas': ranks, **choice})
    return JobPlan(configuration, ranks, batch, seconds=sum(parts.values()),
                   spread=spread, parts=parts)
