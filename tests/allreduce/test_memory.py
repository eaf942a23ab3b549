"""Memory that the ranks of a node, and GPUs, have in common."""
import ctypes
import gc
import os
import warnings

from chainer_fp8pipe.allreduce import memory as module
from chainer_fp8pipe.allreduce.memory import (
    MAIL,
    RESERVED,
    NodeMemory,
    meet,
    node_memory,
)

import numpy
import pytest

from tests.codecs.fake_cupy import Runtime
from tests.ranks import on_ranks


def read(address, size):
    return ctypes.string_at(address, size)


def given_out(memory):
    """Bytes of addresses that arrays have, the token's among them."""
    memory._take_back()
    return RESERVED - sum(stop - start for start, stop in memory._holes)


@on_ranks(1, 2, 4)
def test_neighbours_read_what_is_written_later(comm):
    neighbours = meet(comm, 4 + comm.rank)
    mails = 4 + comm.size - 1       # the most that any asks for
    assert [one.rank for one in neighbours] == [
        rank for rank in range(comm.size) if rank != comm.rank]
    array = node_memory().empty(5000)
    array[...] = comm.rank + 1
    places = comm.allgather(array.ctypes.data - node_memory().address)
    for one in neighbours:
        assert read(one.address + places[one.rank], 5000) == bytes(
            [one.rank + 1]) * 5000
        assert read(one.inbox, mails * MAIL) == bytes(mails * MAIL)
    comm.Barrier()
    # An outbox is the other's inbox.
    for one in neighbours:
        ctypes.memset(one.outbox, 10 * comm.rank + one.rank,
                      mails * MAIL)
    comm.Barrier()
    for one in neighbours:
        assert read(one.inbox, mails * MAIL) == bytes(
            [10 * one.rank + comm.rank]) * (mails * MAIL)


@pytest.mark.parametrize('case', ['none', 'elsewhere', 'mistaken'])
@on_ranks(2)
def test_where_ranks_cannot_open_each_others_memory_there_are_no_neighbours(
        comm, case):
    """It has none, is of another host, or a file's number is another's."""
    other = NodeMemory()
    other.name = other.name._replace(**(
        {'place': f'host {comm.rank}'} if case == 'elsewhere'
        else {'token': bytes(16)}))
    with pytest.MonkeyPatch.context() as patch:
        if case != 'none' or comm.rank == 1:
            patch.setattr(module, 'node_memory',
                          lambda: None if case == 'none' else other)
        assert meet(comm, 8) == ()


@pytest.mark.parametrize('seed', range(5))
def test_arrays_do_not_overlap_and_are_given_back(seed):
    generator = numpy.random.default_rng(seed)
    memory, kept = NodeMemory(), []
    before = given_out(memory)
    for number in range(20):
        size = int(generator.integers(0, 50_000))
        array = memory.empty(size)
        assert (array.ctypes.data % 4096, array.size) == (0, size)
        assert memory.holds(array)
        assert not array.any()      # what is given back is emptied
        array[...] = number + 1
        if generator.random() < 0.5:
            kept.append((number + 1, array.view()))
        del array
    assert all((view == value).all() for value, view in kept)
    kept.clear()
    gc.collect()
    assert given_out(memory) == before
    # In one piece again.
    assert memory.empty(RESERVED - before).size == RESERVED - before


def test_more_than_all_addresses_is_an_error_in_words():
    memory = NodeMemory()
    with pytest.raises(MemoryError, match='128.0 GiB .* shared_memory=False'):
        memory.empty(RESERVED * 2)
    assert memory.empty(1).size == 1


def test_a_system_without_it_has_none(monkeypatch):
    monkeypatch.delattr(os, 'memfd_create')
    node_memory.cache_clear()
    try:
        assert node_memory() is None
    finally:
        node_memory.cache_clear()


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')
def test_a_process_that_is_forked_off_gives_nothing_back():
    memory, runtime = NodeMemory(), Runtime()
    array = memory.empty_locked(runtime, 100_000)
    array[...] = 7
    before = given_out(memory)
    child = os.fork()
    if not child:
        del array
        gc.collect()
        os._exit(given_out(memory) != before or len(runtime.calls) != 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (array == 7).all()
    assert runtime.holds(array)


# --- with pages that are locked ----------------------------------------------

def test_pages_are_locked_as_long_as_a_part_of_them_is_used():
    """The runtime refuses to register one twice: arrays share none."""
    runtime, memory = Runtime(), NodeMemory()
    kept = [memory.empty_locked(runtime, size)
            for size in (1, 4095, 4096, 4097, 9)]
    del kept[1]
    gc.collect()
    kept.append(memory.empty_locked(runtime, 3000))
    assert len(runtime.registered) == 5
    assert all(map(runtime.holds, kept))
    kept.clear()
    gc.collect()
    runtime.calls.clear()
    array = memory.empty_locked(runtime, 10_000)
    assert array.shape == (10_000,)
    assert array.dtype == numpy.uint8
    assert memory.holds(array)
    assert runtime.holds(array)
    part = array.view(numpy.float32)[100:200][::2]
    del array
    gc.collect()
    assert len(runtime.registered) == 1
    del part
    gc.collect()
    assert not runtime.registered
    assert [name for name, _ in runtime.calls] == ['register', 'unregister']
    # The same place may be registered again: it was unlocked before.
    address = memory.empty_locked(runtime, 5000).ctypes.data
    gc.collect()
    assert memory.empty_locked(runtime, 5000).ctypes.data == address


def test_where_cuda_refuses_there_is_one_warning_with_the_remedy():
    runtime, memory = Runtime(), NodeMemory()
    before, runtime.refuses = given_out(memory), True
    with pytest.warns(RuntimeWarning) as found:
        assert memory.empty_locked(runtime, 5000) is None
    text = str(found.pop(RuntimeWarning).message)
    assert 'cudaErrorMemoryAllocation' in text
    assert 'ulimit -l unlimited' in text
    assert 'shared_memory=False' in text
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert memory.empty_locked(runtime, 5000) is None
    assert given_out(memory) == before


def test_pages_that_cannot_be_unlocked_are_not_locked_again():
    class Stuck(Runtime):
        def hostUnregister(self, address):
            raise self.CUDARuntimeError('cudaErrorUnknown')
    runtime, memory = Stuck(), NodeMemory()
    assert memory.empty_locked(runtime, 5000) is not None
    gc.collect()
    with pytest.warns(RuntimeWarning, match='AlreadyRegistered'):
        assert memory.empty_locked(runtime, 5000) is None


@pytest.mark.gpu
def test_a_gpu_copies_to_and_from_memory_that_is_locked(real):
    import cupy
    runtime = cupy.cuda.runtime
    array = NodeMemory().empty_locked(runtime, 1 << 20)
    values = numpy.random.default_rng(0).integers(0, 256, 1 << 20, 'u1')
    there = real.to(values)
    there.get(out=array)
    assert (array == values).all()
    array[...] = ~values
    there.set(array)
    cupy.cuda.get_current_stream().synchronize()
    assert (real.back(there) == ~values).all()
    address = array.ctypes.data
    with pytest.raises(runtime.CUDARuntimeError):       # it is, already
        runtime.hostRegister(address, 4096, 0)
    del array
    gc.collect()
    runtime.hostRegister(address, 4096, 0)      # it is no more
    runtime.hostUnregister(address)
