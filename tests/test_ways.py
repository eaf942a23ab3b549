"""How many modules data pass on their way through the package."""
import collections
import json
import os
import sys

import chainer_fp8pipe

import chainer
import chainermn
import numpy as np
from mpi4py import MPI

from tests.ranks import run_script
from tests.training.updaters.networks import Plain, dataset
from tests.training.updaters.test_pipeline_updater import make_updater

ROOT = os.path.dirname(chainer_fp8pipe.__file__) + os.sep
MICRO_BATCHES = 4
#: Have data of every micro-batch pass, intercept's patches of Chainer among
#: them.
MODULES = 12
#: Of one update of a communicator, but for services, which see no gradient.
MODULES_OF_GRADIENT = 9
SERVICES = {'exchange/lockstep.py', 'mpi/agreement.py',
            'mpi/failure/update_count.py', 'mpi/failure/waits.py',
            'mpi/forever.py', 'mpi/waiting.py', 'report/stream.py'}
#: Have only the batch as a whole pass, once for each step.
MODULES_OF_BATCH = 4


class Ways:
    """Counts the calls in a block that data pass, by module and function.

    Data pass a call that has a name for an activation or a gradient, or
    returns one, by itself or in tuples, lists and dictionaries.  In these
    tests they are of float32, and nothing else is: clocks, agreements of
    ranks, waits, random places and the like have none.

    Attributes:
        seen: How often each function was passed, by module.
        services: The modules that were called without any data.
    """

    def __init__(self):
        self.seen = collections.defaultdict(collections.Counter)
        self.services = set()

    def __enter__(self):
        sys.setprofile(self._look)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        self.services -= self.seen.keys()

    def _look(self, frame, event, returned):
        code = frame.f_code
        if event != 'return' or not code.co_filename.startswith(ROOT):
            return
        module = code.co_filename[len(ROOT):].replace(os.sep, '/')
        self.services.add(module)
        if _has_data((*frame.f_locals.values(), returned)):
            self.seen[module][code.co_name, code.co_firstlineno] += 1

    def passed(self, at_least):
        """The modules with a function that was passed so often."""
        return {module for module, calls in self.seen.items()
                if max(calls.values()) >= at_least}


def _has_data(value, depth=4):
    if isinstance(value, chainer.Parameter):
        return False        # and is not looked at: it may wait for its update
    if isinstance(value, (chainer.Variable, np.ndarray)):
        return value.dtype == np.float32
    if isinstance(value, dict):
        value = list(value.values())
    return depth > 0 and isinstance(value, (tuple, list)) and any(
        _has_data(item, depth - 1) for item in value)


def in_ranks_of_their_own(function):
    """What rank 0 of two new ranks prints, which no test has used before.

    In others, another test's communicator may still watch Chainer.
    """
    done = run_script(2, '-W', 'ignore', '-c', 'from tests import test_ways; '
                      f'test_ways.{function.__name__}()')
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def of_a_micro_batch():
    updater = make_updater(MPI.COMM_WORLD, Plain, dataset(12),
                           micro_batches=MICRO_BATCHES)
    for _ in range(2):      # what is done once is done then
        updater.update()
    with Ways() as ways:
        updater.update()
    say(ways.passed(MICRO_BATCHES), ways.passed(1), ways.services)


def of_a_gradient():
    communicator = chainer_fp8pipe.create_communicator('fp8', warmup=1)
    model = chainer.links.Linear(300, 50)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), communicator).setup(model)
    x = np.ones((4, 300), 'f')

    def update():
        optimizer.update(lambda: chainer.functions.sum(model(x)))
    for _ in range(4):      # what is done once is done then
        update()
    with Ways() as ways:
        update()
    say(ways.services | ways.seen.keys())


def say(*sets):
    """Prints the unions of the ranks' sets, on rank 0."""
    found = [sorted(set().union(*MPI.COMM_WORLD.allgather(one)))
             for one in sets]
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(found))


def test_a_micro_batch_passes_few_modules():
    passed, once, services = map(set, in_ranks_of_their_own(
        of_a_micro_batch))
    assert len(passed) <= MODULES, sorted(passed)
    assert len(once - passed) <= MODULES_OF_BATCH, sorted(once - passed)
    for module in ('stage_executor', 'chunk', 'gradient_sums', 'loss'):
        assert f'pipeline/{module}.py' in passed, module
    assert 'channel/channel.py' in passed
    assert 'mpi/agreement.py' in services


def test_a_gradient_passes_few_modules():
    called = set(in_ranks_of_their_own(of_a_gradient)[0])
    assert called >= SERVICES
    assert len(called - SERVICES) <= MODULES_OF_GRADIENT, sorted(called)
    for module in 'exchange/reducer', 'codecs/fp8_ratio', 'allreduce/bucket':
        assert f'{module}.py' in called, module
