"""The GPU's compiler takes the kernels; ``test_gpu`` runs them."""
import re

from chainer_fp8pipe.formats import gpu

import pytest

from . import compilers


@pytest.fixture(scope='module')
def nvrtc():
    return compilers.Nvrtc()


@pytest.mark.parametrize('architecture', ['sm_80', 'sm_90'])
@pytest.mark.parametrize(
    'kernel', gpu.KERNELS.values(), ids=[*gpu.KERNELS])
def test_the_gpu_compiler_takes_every_kernel(nvrtc, kernel, architecture):
    ptx = nvrtc.ptx(compilers.cuda_source(kernel), architecture)
    assert f'.entry fp8pipe_{kernel.name}' in ptx
    # Contraction, flushing and approximate division would change bits.
    assert not re.search(r'fma\.|\.ftz|div\.(full|approx)|\.f64', ptx)


def test_a_kernel_that_does_not_compile_is_noticed(nvrtc):
    broken = gpu.KERNELS['decode']._replace(
        operation='value = e5m2_decod(code);')
    with pytest.raises(RuntimeError, match='e5m2_decod'):
        nvrtc.ptx(compilers.cuda_source(broken), 'sm_80')
