"""The GPU's compiler takes the kernels; ``test_record_gpu`` runs them."""
import re

from chainer_fp8pipe.block_formats import record_kernels

import numpy as np
import pytest

from tests.fp8 import compilers

from . import host_kernels


@pytest.fixture(scope='module')
def nvrtc():
    return compilers.Nvrtc()


@pytest.mark.parametrize('architecture', ['sm_80', 'sm_90'])
def test_the_gpu_compiler_takes_every_kernel(nvrtc, architecture):
    ptx = nvrtc.ptx(record_kernels.source(), architecture)
    assert set(re.findall(r'\.entry (\w+)', ptx)) == {*host_kernels.KERNELS}
    # Contraction, flushing and approximate division would change bits.
    assert not re.search(
        r'fma\.|\.ftz|(div|rcp)\.(full|approx)|\.f64', ptx)
    assert '.local' not in ptx      # registers hold all that a thread has


def test_a_kernel_that_does_not_compile_is_noticed(nvrtc):
    broken = record_kernels.source().replace('store_record(bits', 'store(bits')
    with pytest.raises(RuntimeError, match='"store" is undefined'):
        nvrtc.ptx(broken, 'sm_80')


def test_blocks_have_whole_warps_and_enough_threads():
    assert record_kernels.THREADS % 32 == 0
    for elements in (0, 1, 1023, 1024, 1025, 2 ** 34):
        threads = record_kernels.blocks(elements) * record_kernels.THREADS
        records = -(-elements // 32)
        assert 8 * records <= threads < 8 * records + record_kernels.THREADS


def test_the_stand_in_notices_threads_that_do_not_meet_the_others():
    """A GPU might wait for ever."""
    wrong = record_kernels.source().replace(
        'float v[EACH];', 'float v[EACH]; if (begin >= n) return;')
    values, wire = np.ones(33, np.float32), np.zeros(34, np.uint8)
    arguments = values, np.float32(1), wire, np.int64(33)
    host_kernels.launch('encode_alone_INT4', (1,), (256,), arguments)
    with pytest.raises(AssertionError, match='have not met'):
        host_kernels.launch('encode_alone_INT4', (1,), (256,), arguments,
                            wrong)
