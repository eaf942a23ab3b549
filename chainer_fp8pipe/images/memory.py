"""Memory of the machine, or of this process's control groups if less.

Not psutil: its ``virtual_memory`` reads ``/proc/meminfo`` alone, and a
container is killed at the limit of its control group.
"""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_ROOT = '/sys/fs/cgroup'


def total_bytes() -> int:
    """Bytes that the machine has, or a control group may use if fewer."""
    return min([_machine('MemTotal'), *(limit for limit, _ in _groups())])


def available_bytes() -> int:
    """Bytes that can still be used without swapping or a kill."""
    return min([_machine('MemAvailable'),
                *(max(limit - used, 0) for limit, used in _groups())])


def _machine(field: str) -> int:
    with contextlib.suppress(OSError, KeyError):
        return _fields('/proc/meminfo')[field] * 1024
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def _groups() -> Iterator[tuple[int, int]]:
    """Limit and present use, in bytes, of each group that has a limit."""
    for folder, limit, used in _files():
        # 'max' in place of a number means no limit.
        with contextlib.suppress(OSError, ValueError, KeyError):
            most = int(_read(os.path.join(folder, limit)))
            now = int(_read(os.path.join(folder, used)))
            parts = _fields(os.path.join(folder, 'memory.stat'))
            # Pages of files are given back when memory is short.
            yield most, now - parts['active_file'] - parts['inactive_file']


def _files() -> Iterator[tuple[str, str, str]]:
    """Folder and file names of this process's groups, up to the root."""
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
