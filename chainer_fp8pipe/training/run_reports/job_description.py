"""What a job is: versions, options, environment, in words."""
from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from typing import Any

import chainer
from mpi4py import MPI

from ..._version import __version__
from ...report.launch_protocol import ENDED, LAUNCHED, is_launched
from ...report.record import RunStart

_PACKAGES = 'chainer', 'numpy', 'mpi4py', 'cupy', 'scipy', 'Pillow'
#: Beginnings of the names of variables that change how ranks run.
_VARIABLES = ('CHAINER_', 'CHAINERMN_', 'OMP_', 'OPENBLAS_', 'MKL_', 'CUDA_',
              'CUPY_', 'NCCL_', 'MPIR_CVAR_', 'MPICH_', 'OMPI_MCA_',
              'SLURM_JOB_ID', 'SLURM_NNODES', 'UCX_', 'FI_')
#: They tell a launcher's processes, and are of no use to a reader.
_PRIVATE = LAUNCHED, ENDED


def describe_start(trainer: Any, number: int, iteration: int, ranks: int,
                   hosts: tuple[str, ...], stages: tuple[int, ...],
                   reporting: tuple[int, ...], origin: float) -> RunStart:
    """The start of this job; call it on rank 0.

    Args:
        trainer: Of the training that begins.
        number: Of the start.
        iteration: Updates done before.
        ranks: Of the whole job.
        hosts: Of each rank.
        stages: Of each rank; () without a pipeline.
        reporting: Ranks whose data there will be.
        origin: What ``time.monotonic`` showed at the start.
    """
    ended = json.loads(os.environ.get(ENDED, '[]'))
    return RunStart(
        number, time.time() - (time.monotonic() - origin), iteration, ranks,
        hosts, stages, tuple(sys.argv), _versions(), _options(trainer),
        _environment(), len(ended) if is_launched() else None,
        ended[-1] if ended else '', reporting, origin)


def _options(trainer: Any) -> dict[str, str]:
    """How the training is set up, in words."""
    updater = trainer.updater
    found = {'updater': type(updater).__name__}
    for name, optimizer in updater.get_all_optimizers().items():
        suffix = '' if name == 'main' else f' {name}'
        actual = getattr(optimizer, 'actual_optimizer', optimizer)
        found[f'optimizer{suffix}'] = type(actual).__name__
        found[f'hyperparameters{suffix}'] = _hyperparameters(actual)
        target = actual.target
        found[f'model{suffix}'] = (
            f'{type(target).__name__}, {_elements(target)} parameters')
        communicator = getattr(optimizer, 'communicator', None)
        if communicator is not None:
            found[f'communicator{suffix}'] = getattr(
                communicator, 'name', type(communicator).__name__)
            if hasattr(communicator, 'options'):
                found |= {option: str(value) for option, value
                          in vars(communicator.options).items()}
    if (schedule := getattr(updater, 'schedule', None)) is not None:
        found |= {'schedule': schedule.name, 'stages': str(schedule.stages),
                  'micro-batches': str(schedule.micro_batches)}
    if (grid := getattr(updater, 'grid', None)) is not None:
        found['replicas'] = str(grid.replicas)
    for name, iterator in getattr(updater, '_iterators', {}).items():
        found[f'iterator {name}'] = type(iterator).__name__
        if isinstance(getattr(iterator, 'batch_size', None), int):
            found[f'batch of a rank, {name}'] = str(iterator.batch_size)
    return found


def _hyperparameters(optimizer: Any) -> str:
    return ', '.join(f'{name}={value:g}' for name, value in sorted(
        optimizer.hyperparam.get_dict().items())
        if isinstance(value, (int, float)))


def _elements(target: Any) -> int:
    return sum(parameter.size for parameter in target.params()
               if parameter.array is not None)


def _versions() -> dict[str, str]:
    found = {'Python': platform.python_version(),
             'chainer_fp8pipe': __version__, 'chainer': chainer.__version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found['MPI'] = MPI.Get_library_version().replace('\0', '').split('\n')[0]
    found['system'] = platform.platform()
    return found


def _environment() -> dict[str, str]:
    found = {name: value for name, value in sorted(os.environ.items())
             if name.startswith(_VARIABLES) and name not in _PRIVATE}
    found['cpu'] = _processor()
    found['cores'] = str(len(os.sched_getaffinity(0))
                         if hasattr(os, 'sched_getaffinity')
                         else os.cpu_count())
    if hasattr(os, 'sysconf') and 'SC_PHYS_PAGES' in os.sysconf_names:
        nbytes = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
        found['memory'] = f'{nbytes / 1e9:.1f} GB'
    return found


def _processor() -> str:
    try:
        with open('/proc/cpuinfo') as file:
            for line in file:
                if line.startswith('model name'):
                    return line.partition(':')[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
