"""Memory that the ranks of a node have in common."""
import ctypes
import gc
import os

from chainer_fp8pipe.mpi.memory import node_memory as module
from chainer_fp8pipe.mpi.memory.node_memory import (
    NodeMemory,
    meet,
    node_memory,
)

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import on_ranks


def read(address, size):
    return ctypes.string_at(address, size)


@on_ranks(1, 2, 4)
def test_neighbours_read_what_is_written_later(comm):
    neighbours = meet(comm, 8, 64)
    assert [one.rank for one in neighbours] == [
        rank for rank in range(comm.size) if rank != comm.rank]
    array = node_memory().empty(5000)
    array[...] = comm.rank + 1
    places = comm.allgather(array.ctypes.data - node_memory().address)
    for one in neighbours:
        assert read(one.address + places[one.rank], 5000) == bytes(
            [one.rank + 1]) * 5000
    comm.Barrier()


@on_ranks(2, 3)
def test_an_outbox_is_the_others_inbox(comm):
    neighbours = meet(comm, 4 + comm.rank, 64)
    for one in neighbours:
        assert one.slots == 4 + comm.size - 1       # the most
        assert read(one.inbox, one.slots * 64) == bytes(one.slots * 64)
    comm.Barrier()
    for one in neighbours:
        ctypes.memset(one.outbox, 10 * comm.rank + one.rank, one.slots * 64)
    comm.Barrier()
    for one in neighbours:
        assert read(one.inbox, one.slots * 64) == bytes(
            [10 * one.rank + comm.rank]) * (one.slots * 64)


@on_ranks(2)
def test_where_one_rank_has_no_such_memory_there_are_no_neighbours(comm):
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(module, 'node_memory', lambda: None)
        assert meet(comm, 8, 64) == ()


@on_ranks(2)
def test_ranks_of_other_places_are_no_neighbours(comm):
    elsewhere = NodeMemory()
    elsewhere.name = elsewhere.name._replace(place=f'host {comm.rank}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, 'node_memory', lambda: elsewhere)
        assert meet(comm, 8, 64) == ()


@on_ranks(2)
def test_a_file_that_is_another_one_is_not_taken_for_memory(comm):
    mistaken = NodeMemory()
    mistaken.name = mistaken.name._replace(token=bytes(16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, 'node_memory', lambda: mistaken)
        assert meet(comm, 8, 64) == ()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200_000), st.booleans()),
                max_size=30))
def test_arrays_do_not_overlap_and_are_given_back(sizes):
    memory, kept = NodeMemory(), []
    for number, (size, keeps) in enumerate(sizes):
        array = memory.empty(size)
        assert array.ctypes.data % 4096 == 0
        assert array.size == size
        assert 0 <= array.ctypes.data - memory.address < module.RESERVED
        assert not array.any()      # what is given back is emptied
        array[...] = number % 255 + 1
        if keeps:
            kept.append((number % 255 + 1, array.view()))
        del array
    assert all((view == value).all() for value, view in kept)
    kept.clear()
    gc.collect()
    memory._take_back()
    assert memory._holes == [(4096, module.RESERVED)]


def test_more_than_all_addresses_is_an_error_in_words():
    memory = NodeMemory()
    with pytest.raises(MemoryError, match='128.0 GiB .* shared_memory=False'):
        memory.empty(module.RESERVED * 2)
    assert memory.empty(1).size == 1


def test_memory_lives_as_long_as_a_part_of_it_is_used():
    memory = NodeMemory()
    part = memory.empty(40_000).view(numpy.float32)[100:200][::2]
    part[...] = 3
    gc.collect()
    again = memory.empty(40_000)
    again[...] = 0
    assert (part == 3).all()


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='nothing is forked here')
def test_a_process_that_is_forked_off_gives_nothing_back():
    memory = NodeMemory()
    array = memory.empty(100_000)
    array[...] = 7
    child = os.fork()
    if not child:
        del array
        gc.collect()
        memory.empty(1)
        os._exit(len(memory._freed))
    assert os.waitpid(child, 0)[1] == 0
    assert (array == 7).all()


def test_a_system_without_it_has_none(monkeypatch):
    monkeypatch.delattr(os, 'memfd_create')
    node_memory.cache_clear()
    try:
        assert node_memory() is None
    finally:
        node_memory.cache_clear()
