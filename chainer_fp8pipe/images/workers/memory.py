"""How much memory there is, for this process and those beside it."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_ROOT = '/sys/fs/cgroup'


def total_bytes() -> int:
    """What the machine has, or a control group of this process may use."""
    return min([_machine('MemTotal'), *(limit for limit, _ in _groups())])


def available_bytes() -> int:
    """What can still be used without anything being swapped or killed."""
    return min([_machine('MemAvailable'),
                *(max(limit - used, 0) for limit, used in _groups())])


def _machine(field: str) -> int:
    with contextlib.suppress(OSError, KeyError):
        return _fields('/proc/meminfo')[field] * 1024
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def _groups() -> Iterator[tuple[int, int]]:
    """Limit and present use of each control group that has a limit."""
    for folder, limit, used in _files():
        # 'max' in place of a number means no limit.
        with contextlib.suppress(OSError, ValueError, KeyError):
            most = int(_read(os.path.join(folder, limit)))
            now = int(_read(os.path.join(folder, used)))
            parts = _fields(os.path.join(folder, 'memory.stat'))
            # Pages of files are given back when memory is short.
            yield most, now - parts['active_file'] - parts['inactive_file']


def _files() -> Iterator[tuple[str, str, str]]:
    """Where control groups say it: those of this process, up to the root."""
    lines = []
    with contextlib.suppress(OSError):
        lines = _read('/proc/self/cgroup').splitlines()
    for line in lines:
        _, kinds, path = line.split(':', 2)
        if kinds == '':
            names = _ROOT, 'memory.max', 'memory.current'
        elif kinds == 'memory':
            names = (_ROOT + '/memory', 'memory.limit_in_bytes',
                     'memory.usage_in_bytes')
        else:
            continue
        while path.strip('/'):
            yield names[0] + path, *names[1:]
            path = os.path.dirname(path)
        yield names


def _fields(path: str) -> dict[str, int]:
    """Lines such as ``name: 12 kB`` or ``name 12``."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0].rstrip(':'): int(row[1]) for row in rows}


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
