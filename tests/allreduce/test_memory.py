"""Memory that the ranks of a node have in common."""
import gc
import os
import resource
import warnings

from chainer_fp8pipe.allreduce.memory import SharedMemory
from chainer_fp8pipe.allreduce.plan import Framing, steps_of

from tests.images.processes import memory_of
from tests.ranks import on_ranks

from .helpers import make, plan


@on_ranks(2)
def test_an_engine_gives_all_its_memory_back_if_it_has_some(comm):
    gc.collect()
    before = memory_of(os.getpid()), len(os.listdir('/proc/self/fd'))
    for framing in {'shared_memory': False}, {'frame_bytes': 1 << 60}:
        made = make('direct', comm, **framing)
        # There is none, or it would be too much.
        assert memory_of(os.getpid()) == before[0]
        made.free()
    for _ in range(20):
        made = make('direct', comm)
        assert memory_of(os.getpid()) > before[0]
        made.free()
        del made
        gc.collect()
    assert (memory_of(os.getpid()), len(os.listdir('/proc/self/fd'))) == before


@on_ranks(2)
def test_a_limit_that_is_too_low_is_said_and_messages_are_sent(comm):
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open('/proc/self/statm') as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        try:
            if comm.rank:
                resource.setrlimit(resource.RLIMIT_AS,
                                   (used + (64 << 20), limits[1]))
            shared = SharedMemory(
                comm, steps_of(plan('direct', comm.size), comm.rank),
                Framing(64 << 20, 3))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
    assert shared.neighbours == []
    assert len([one for one in said if 'ulimit -v' in str(one.message)]
               ) == comm.rank
