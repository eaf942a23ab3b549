"""Plans as they are measured nowhere, for tests of what becomes of them."""
from chainer_fp8pipe.chains.plan import PartitionPlan
from chainer_fp8pipe.planner.job_plan import JobPlan, Way


def stages(ranks, **options):
    """A plan of two stages for ``train_digits_serially.py``."""
    cut = PartitionPlan(
        tuple((f'/predictor/{layer}/W', f'/predictor/{layer}/b')
              for layer in ('l1', 'l2', 'l3')),
        ((1, 0),), 2, (False, True), 3, '1f1b')
    return JobPlan(Way(ranks // 2, cut, options=options), ranks, 60)
