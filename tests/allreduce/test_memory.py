"""Memory that the ranks of a node have in common."""
import ctypes
import gc
import os

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
    memory = NodeMemory()
    array = memory.empty(100_000)
    array[...] = 7
    before = given_out(memory)
    child = os.fork()
    if not child:
        del array
        gc.collect()
        os._exit(given_out(memory) != before)
    assert os.waitpid(child, 0)[1] == 0
    assert (array == 7).all()
