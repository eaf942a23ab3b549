"""Says in JSON what the GPU is; or ends with status 3 and the reason."""
from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys

from chainer_fp8pipe.compat import explain_no_gpu


def packages() -> str:
    """Names and versions of those that matter."""
    names = ['numpy', 'chainer', 'mpi4py', 'mpich']
    names += sorted({name for found in importlib.metadata.distributions()
                     if (name := found.metadata['Name'] or ''
                         ).startswith('cupy')})
    return ', '.join(f'{name} {importlib.metadata.version(name)}'
                     for name in names)


def driver() -> str:
    """The driver's version, as nvidia-smi tells it."""
    if not shutil.which('nvidia-smi'):
        return 'unknown, as there is no nvidia-smi'
    done = subprocess.run(
        ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader'],
        capture_output=True, text=True)
    return done.stdout.split('\n')[0].strip()


def version(number: int) -> str:
    """13020 as 13.2."""
    return f'{number // 1000}.{number % 1000 // 10}'


def about() -> dict[str, str]:
    """What the head of the report says of the GPU."""
    import cupy
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        'GPU': f'{properties["name"].decode()}, '
               f'{properties["totalGlobalMem"] / 2 ** 30:.0f} GiB, '
               f'{properties["multiProcessorCount"]} multiprocessors, '
               f'compute capability {properties["major"]}.'
               f'{properties["minor"]}',
        'Driver': f'{driver()}, CUDA {version(runtime.driverGetVersion())}',
        'CUDA': version(runtime.runtimeGetVersion()),
        'NCCL': nccl(),
    }


def nccl() -> str:
    """NCCL's version, as CuPy sees it."""
    try:
        from cupy.cuda.nccl import get_version
        return str(get_version())
    except Exception as error:      # of any kind: CuPy loads it on demand
        return f'none ({type(error).__name__})'


def main() -> None:
    head = {'Python': platform.python_version(), 'Packages': packages()}
    reason = explain_no_gpu()
    if reason is None:
        print(json.dumps({**about(), **head}))
        return
    print(json.dumps({'GPU': 'none', **head}))
    print(reason, file=sys.stderr)
    sys.exit(3)


if __name__ == '__main__':
    main()
