"""What is run on a GPU, in the order of what is worth most."""
from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Callable

from .steps import Step

#: Those of ``create_communicator``, and what takes another way on a GPU.
COMMUNICATORS = (
    'fp8', 'fp8_paper', 'int4', 'int5', 'float16', 'float32', 'torus2d',
    'fp8:overlap=true', 'fp8:overlap=next_forward', 'fp8:algorithm=ring',
    'int4:values=e2m1',
    'naive', 'flat', 'non_cuda_aware', 'pure_nccl', 'dummy')
#: These put one rank on each GPU (NCCL refuses more).
NCCL = ('non_cuda_aware', 'pure_nccl')
#: These have no way for gradients on the CPU.
GPU_ONLY = (*NCCL, 'flat', 'dummy')


class Plan:
    """The steps of an environment.

    Args:
        root: The checkout.
        python: The environment's interpreter.
        wheels: Where ``digits.npz`` is.
        out: Where results other than the report go.
        dry: Everything on the CPU, and little of it.
    """

    def __init__(self, root: pathlib.Path, python: pathlib.Path,
                 wheels: pathlib.Path, out: pathlib.Path, dry: bool) -> None:
        self._root, self._python, self._wheels = root, python, wheels
        self._out, self._dry = out, dry
        self._device = '@numpy' if dry else '@cupy:0'
        self._flags = ['--dry'] if dry else []

    def steps(self) -> list[Step]:
        return [self._bits(), self._tests(), self._kernels(), self._staging(),
                *(self._communicator(name) for name in COMMUNICATORS[:8]),
                self._digits(2), self._digits(4),
                self._pipeline(2, 2), self._pipeline(4, 2),
                self._pipeline(4, 4),
                *(self._communicator(name) for name in COMMUNICATORS[8:])]

    def _bits(self) -> Step:
        return Step(
            'Bits', 'Every operation of the number formats, bit for bit '
            'against the CPU: encoding of every float32 number in fp8, '
            'decoding and adding of every code, the others (records of int4, '
            'e2m1 and int5 among them) of random bits, numbers in the range, '
            'and boundaries.',
            self._run('-m', 'tools.gpu.bits', *self._flags), 150)

    def _tests(self) -> Step:
        files = sorted(str(path.relative_to(self._root))
                       for path in (self._root / 'tests').rglob('test_*.py')
                       if path.stem.endswith('gpu')
                       or 'mark.gpu' in path.read_text())
        return Step(
            'Tests', 'The tests marked ``gpu``.',
            self._run('-m', 'pytest', '-q', '-m', 'gpu', '-p',
                      'no:cacheprovider', '--timeout', '60', *files), 120)

    def _kernels(self) -> Step:
        few = ['--dry', '--elements', '100000', '--repeats', '3']
        return Step(
            'Kernels', 'Their speed against a copy inside the memory of the '
            'GPU.', self._benchmark('gpu_kernels', few), 90)

    def _staging(self) -> Step:
        return Step(
            'Staging', 'The way to memory that MPI and other ranks read, and '
            'back; and the codecs on the gradients of a model of 25.5 M '
            'parameters.',
            self._benchmark('gpu_staging', ['--dry', '--repeats', '3']), 90)

    def _communicator(self, spec: str) -> Step:
        ranks = 1 if spec in NCCL else 2 if self._dry else 4
        return Step(
            f'Communicator {spec}', 'Means of the same gradients, and a '
            'short training, against the CPU.',
            self._ranks(ranks, '-m', 'tools.gpu.communicators', spec,
                        '--device', self._device), 90,
            missing='it needs a GPU' if self._dry and spec in GPU_ONLY
            else '')

    def _digits(self, ranks: int) -> Step:
        return Step(
            f'Digits on {ranks} ranks', 'The digits example, all ranks on '
            'one GPU.', self._ranks(
                ranks, 'examples/digits/train_digits.py', '--link', '0',
                *self._example(f'digits-{ranks}', 4)), 90,
            shown=from_line('communicator '), missing=self._pictures())

    def _pipeline(self, ranks: int, stages: int) -> Step:
        return Step(
            f'Pipeline of {stages} stages on {ranks} ranks',
            'The pipeline example, all ranks on one GPU.', self._ranks(
                ranks, 'examples/pipeline/train_pipeline.py',
                *self._example(f'pipeline-{stages}-{ranks}', 4),
                '--pipeline', str(stages)), 75,
            shown=last_lines(14), missing=self._pictures())

    def _example(self, name: str, epochs: int) -> list[str]:
        return ['--device', self._device, '--root', str(self._wheels),
                '--epoch', str(1 if self._dry else epochs),
                '--out', str(self._out / name)]

    def _benchmark(self, name: str, few: list[str]) -> list[str]:
        return self._run(f'benchmarks/{name}.py',
                         *(few if self._dry else []), '--json',
                         str(self._out / f'{name}.json'))

    def _run(self, *arguments: str) -> list[str]:
        return [str(self._python), *arguments]

    def _ranks(self, ranks: int, *arguments: str) -> list[str]:
        launcher = self._python.with_name('mpiexec')
        return [str(launcher), '-n', str(ranks), *self._run(*arguments)]

    def _pictures(self) -> str:
        has = subprocess.run(
            [str(self._python), '-c', 'import matplotlib'],
            stderr=subprocess.DEVNULL).returncode == 0
        return '' if has else 'Matplotlib is not installed'


def from_line(start: str) -> Callable[[str], str]:
    """What follows the last line that begins so, with that line."""
    def shown(text: str) -> str:
        before, found, after = ('\n' + text).rpartition('\n' + start)
        return start + after if found else text
    return shown


def last_lines(count: int) -> Callable[[str], str]:
    """The end of a text."""
    return lambda text: '\n'.join(text.split('\n')[-count:])
