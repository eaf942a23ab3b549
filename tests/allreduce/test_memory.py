"""Memory that the ranks of a node have in common."""
import gc
import os
import resource
import warnings

from chainer_fp8pipe.allreduce import memory as module
from chainer_fp8pipe.allreduce.memory import SharedMemory
from chainer_fp8pipe.allreduce.plan import Framing, steps_of

import pytest

from tests.ranks import on_ranks

from .helpers import make, plan

FRAMING = Framing(256, 2)


def steps(comm):
    return steps_of(plan('direct', comm.size), comm.rank)


@pytest.mark.parametrize('case', [
    'none', 'unwanted', 'elsewhere', 'mistaken', 'whole'])
@on_ranks(2)
def test_where_ranks_cannot_read_each_other_there_are_no_places(comm, case):
    """One has none, is of another host, or a file's number is another's."""
    framing, rank = FRAMING, comm.rank
    with pytest.MonkeyPatch.context() as patch:
        if case == 'none' and rank == 1:
            patch.delattr(os, 'memfd_create')
        elif case == 'elsewhere':
            patch.setattr(module, '_machine', lambda: f'host {rank}')
        elif case == 'mistaken' and rank == 1:
            patch.setattr(os, 'urandom', lambda size: bytes(size))
            patch.setattr(os, 'getpid', lambda: 1)
        elif case == 'unwanted':
            framing = Framing(256, 2, shared_memory=False)
        elif case == 'whole':       # store and forward
            framing = Framing(1 << 60, 2)
        shared = SharedMemory(comm, steps(comm), framing)
    assert shared.neighbours == []
    assert not any(place.mail for place in shared.places)


def mapped():
    with open('/proc/self/maps') as file:
        return sum('memfd:chainer_fp8pipe' in line for line in file)


@on_ranks(2)
def test_an_engine_gives_all_its_memory_back(comm):
    gc.collect()
    before = mapped(), len(os.listdir('/proc/self/fd'))
    for _ in range(20):
        made = make('direct', comm)
        assert mapped() > before[0]
        made.free()
        del made
        gc.collect()
    assert (mapped(), len(os.listdir('/proc/self/fd'))) == before


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
            shared = SharedMemory(comm, steps(comm), Framing(64 << 20, 3))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
    assert shared.neighbours == []
    assert len([one for one in said if 'ulimit -v' in str(one.message)]
               ) == comm.rank
