"""Plans as they are measured nowhere, for tests of what becomes of them."""
from chainer_fp8pipe.planning.job_plan import Configuration, JobPlan
from chainer_fp8pipe.planning.partition_plan import Cut, PartitionPlan

#: Of ``train_digits_serially.py``'s model.
SHAPES = {'/predictor/l1/W': (32, 64), '/predictor/l1/b': (32,),
          '/predictor/l2/W': (32, 32), '/predictor/l2/b': (32,),
          '/predictor/l3/W': (10, 32), '/predictor/l3/b': (10,)}


def replicas(ranks, model=SHAPES, **choice):
    """A plan without stages."""
    return JobPlan(Configuration(ranks, **choice), ranks, 60, model,
                   memory=(1e6,))


def stages(ranks, **choice):
    """A plan of two stages for ``train_digits_serially.py``."""
    cut = PartitionPlan(
        tuple((f'/predictor/{layer}/W', f'/predictor/{layer}/b')
              for layer in ('l1', 'l2', 'l3')),
        (Cut('/predictor/l2/W'),), 2, (False, True), 3, '1f1b')
    return JobPlan(
        Configuration(ranks // 2, 2, 3, cut, **choice), ranks, 60, SHAPES,
        memory=(1e6, 1e6))
