"""Steps that run one after another, whatever becomes of each."""
from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

#: A step that has less than this left is not begun.
LEAST_SECONDS = 5.0
#: The environment variable after which a step's Pythons say where they are.
DUMP_AFTER = 'DUMP_TRACEBACKS_AFTER'


@dataclasses.dataclass(frozen=True)
class Step:
    """Something that runs in a process of its own.

    Attributes:
        name: The heading in the report.
        about: What it does, as sentences.
        command: What is run.
        seconds: The longest that it may take.
        shown: What the report shows of its standard output.
        missing: Why it cannot run; empty where it can.
    """

    name: str
    about: str
    command: Sequence[str]
    seconds: float
    shown: Callable[[str], str] = str
    missing: str = ''


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        step: Which.
        state: ``'done'``, ``'failed'``, ``'out of time'`` or ``'left out'``.
        why: One line; empty where it is done.
        seconds: How long it took.
        output: Its standard output.
        errors: Its standard error.
    """

    step: Step
    state: str
    why: str = ''
    seconds: float = 0.0
    output: str = ''
    errors: str = ''


def run_all(steps: Sequence[Step], end: float, folder: str,
            environment: Mapping[str, str],
            after: Callable[[Outcome], None]) -> list[Outcome]:
    """Runs the steps in their order; none keeps the next from running.

    Args:
        steps: What to run.
        end: When all must have ended, on ``time.monotonic``'s clock.
        folder: Where they run.
        environment: Their environment variables.
        after: Called with each outcome, as it is known.
    """
    outcomes = []
    for step in steps:
        outcomes.append(run(step, end, folder, environment))
        after(outcomes[-1])
    return outcomes


def run(step: Step, end: float, folder: str,
        environment: Mapping[str, str]) -> Outcome:
    """Runs one step, and ends it and its children when its time is over."""
    left = min(step.seconds, end - time.monotonic())
    if step.missing:
        return Outcome(step, 'left out', step.missing)
    if left < min(LEAST_SECONDS, step.seconds):
        return Outcome(step, 'left out', 'no time was left')
    start = time.monotonic()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile(
            ) as errors:
        try:
            process = subprocess.Popen(
                [*step.command], cwd=folder, stdin=subprocess.DEVNULL,
                stdout=output, stderr=errors, start_new_session=True,
                env={**environment, DUMP_AFTER: f'{_dump_after(left):.1f}'})
        except OSError as error:
            return Outcome(step, 'failed', f'did not start: {error}')
        state, why = _wait(process, left)
        # Whatever it has left behind ends with it.
        _signal(process.pid, signal.SIGKILL)
        return Outcome(step, state, why, time.monotonic() - start,
                       _text(output), _text(errors))


def _dump_after(seconds: float) -> float:
    # From a Python's start on, which may be some seconds after the step's.
    return max(seconds - 8, seconds / 2)


def _wait(process: subprocess.Popen, seconds: float) -> tuple[str, str]:
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        # A launcher passes this on to its ranks, which a kill does not reach.
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)
        _signal(process.pid, signal.SIGKILL)
        process.wait()
        return 'out of time', f'ended after {seconds:.0f} s'
    if status:
        return 'failed', (f'exit status {status}' if status > 0
                          else f'ended by {signal.Signals(-status).name}')
    return 'done', ''


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _text(file) -> str:
    file.seek(0)
    return file.read().decode(errors='replace')
