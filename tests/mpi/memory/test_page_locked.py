"""Node memory that a GPU copies to and from by itself."""
import gc
import os
import warnings

from chainer_fp8pipe.mpi.memory.node_memory import NodeMemory
from chainer_fp8pipe.mpi.memory.page_locked import PageLockedMemory

import numpy
import pytest

from tests.codecs.fake_cupy import Runtime


@pytest.fixture
def memory():
    return NodeMemory()


def test_pages_are_locked_as_long_as_a_part_of_them_is_used(memory):
    runtime = Runtime()
    array = PageLockedMemory(memory).empty(runtime, 10_000)
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


def test_pages_are_unlocked_before_they_can_be_another_arrays(memory):
    runtime, freed = Runtime(), []
    free = memory._free

    def note(start, stop):
        freed.append(dict(runtime.registered))
        free(start, stop)
    memory._free = note
    array = PageLockedMemory(memory).empty(runtime, 5000)
    address = array.ctypes.data
    del array
    gc.collect()
    assert freed == [{}]
    # The same place may be registered again.
    again = PageLockedMemory(memory).empty(runtime, 5000)
    assert again.ctypes.data == address


def test_arrays_of_several_sizes_share_no_page(memory):
    """The runtime refuses to register a page twice."""
    runtime, locked = Runtime(), PageLockedMemory(memory)
    kept = [locked.empty(runtime, size) for size in (1, 4095, 4096, 4097, 9)]
    del kept[1]
    gc.collect()
    kept.append(locked.empty(runtime, 3000))
    assert len(runtime.registered) == 5
    assert all(map(runtime.holds, kept))


def test_where_cuda_refuses_there_is_one_warning_with_the_remedy(memory):
    runtime, locked = Runtime(), PageLockedMemory(memory)
    runtime.refuses = True
    with pytest.warns(RuntimeWarning) as found:
        assert locked.empty(runtime, 5000) is None
    text = str(found.pop(RuntimeWarning).message)
    assert 'cudaErrorMemoryAllocation' in text
    assert 'ulimit -l unlimited' in text
    assert 'shared_memory=False' in text
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert locked.empty(runtime, 5000) is None
    memory._take_back()
    assert len(memory._holes) == 1      # what was refused is given back


def test_pages_that_cannot_be_unlocked_are_not_locked_again(memory):
    class Stuck(Runtime):
        def hostUnregister(self, address):
            raise self.CUDARuntimeError('cudaErrorUnknown')
    runtime, locked = Stuck(), PageLockedMemory(memory)
    assert locked.empty(runtime, 5000) is not None
    gc.collect()
    with pytest.warns(RuntimeWarning, match='AlreadyRegistered'):
        assert locked.empty(runtime, 5000) is None


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='nothing is forked here')
def test_a_process_that_is_forked_off_unlocks_nothing(memory):
    runtime = Runtime()
    array = PageLockedMemory(memory).empty(runtime, 5000)
    child = os.fork()
    if not child:
        del array
        gc.collect()
        os._exit(len(runtime.calls) - 1)
    assert os.waitpid(child, 0)[1] == 0
    assert runtime.holds(array)


@pytest.mark.gpu
def test_a_gpu_copies_to_and_from_memory_that_is_locked(real, memory):
    import cupy
    runtime = cupy.cuda.runtime
    array = PageLockedMemory(memory).empty(runtime, 1 << 20)
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
