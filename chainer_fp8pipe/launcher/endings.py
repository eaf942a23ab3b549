"""How a start of a job has ended, from what was heard of it."""
from __future__ import annotations

import signal

from .job_output import JobOutput
from .restart_policy import USAGE, Ending


def ending_of(output: JobOutput, code: int, progressed: bool,
              on_purpose: bool, has_hosts: bool) -> Ending:
    """Puts an ending into words.

    Args:
        output: What the job has said.
        code: Of the program that started the ranks; negative: the signal
            that killed it.
        progressed: Whether the next start begins further on.
        on_purpose: Whether the launcher has ended the job.
        has_hosts: Whether ranks are on other hosts, so that an exit code may
            be that of a network.
    """
    failure = ''
    if code == 0 and not on_purpose:
        cause = 'its end, in order'
    elif on_purpose:
        cause = 'the launcher, as all hosts answer again'
    elif output.stalled or output.dead:
        cause = output.stalled or output.dead
    elif output.failed:
        failure = output.error or 'an exception'
        cause = f'{output.failed}: {failure}'
    elif code < 0:
        cause = ('what starts the ranks was killed by '
                 f'{signal.Signals(-code).name}')
    else:
        cause = f'exit code {code}'
        failure = cause if code == USAGE or not has_hosts else ''
    return Ending(code, cause, failure, output.update is not None,
                  progressed)
