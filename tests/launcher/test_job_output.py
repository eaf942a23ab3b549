"""What ranks say that the launcher acts upon, and how a start has ended."""
from chainer_fp8pipe.launcher.attempt import JobOutput, Lines, ending_of
from chainer_fp8pipe.report.launch_protocol import (
    DONE,
    FAILED,
    RANK,
    STILL,
    UPDATED,
)

import pytest

LINES = f'''chainer_fp8pipe: communicator 'fp8' in place of 'naive'
{UPDATED}51

{RANK}rank 1 of 4 = PID 7 on h
{RANK}rank 2 of 4 = PID 8 on h
[chainer_fp8pipe] an application's own line
a bar: 100%{UPDATED}52
'''
#: What Hydra prints on the standard output where rank 1 was killed.
DIED = '''
===========================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 7 RUNNING AT h
===========================================================================
[mpiexec@h] Exit codes: CODES
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
'''
BY_KILL = 'killed by SIGKILL (the system does that when memory is short)'
KILLED = f'rank 1 of 4, process 7 on host h, was {BY_KILL}'
FAULT = (f'{FAILED}rank 3 of 4: my.module.Trouble: it is broken: zwölfmal\n'
         f'{FAILED}rank 1 of 4: KeyError: 1\n')
WHY = ('the job stands still: no rank has finished an update for 5 seconds; '
       'rank 1 is stopped')


def shown(output, text):
    """What is shown of a text."""
    return Lines(output.look).feed(text.encode()).decode()


def died(codes):
    return DIED.replace('CODES', codes)


def test_what_is_for_the_launcher_is_not_shown(capfd):
    output = JobOutput()
    assert shown(output, LINES) == '''\
chainer_fp8pipe: communicator 'fp8' in place of 'naive'

[chainer_fp8pipe] an application's own line
a bar: 100%'''
    assert 'Exit codes' not in shown(output, died('[h] 0,9,0'))
    assert (output.updates, output.cause) == ([51, 52], KILLED)
    assert output.failed == output.error == ''
    assert capfd.readouterr().err.count('trains: update 51 is done') == 1


def test_a_progress_bar_is_shown_as_it_comes():
    output = JobOutput()
    feed = Lines(output.look).feed
    bar = '█ 12 % [00:'.encode()
    for piece, said in (
            (bar, bar), (b'\r', b'\r'), (f'{UPDATED}5\n'.encode(), b''),
            (UPDATED.encode(), b''), (b'7\nand', b'and'),
            (b' [mpiexec@a] err', b' '), (b'or\n', b'[mpiexec@a] error\n'),
            (f'last{DONE}\n{DONE}\n'.encode(), b'last')):
        assert feed(piece) == said
    assert output.updates == [5, 7]
    assert output.done == 2


@pytest.mark.parametrize(('said', 'cause'), [
    # Open MPI's words, and Slurm's.
    ('mpirun noticed that process rank 1 with PID 7 on node h exited on '
     'signal 9 (Killed).', KILLED),
    ('mpirun noticed that process rank 3 with PID 0 on node localhost exited '
     'on signal 9 (Killed).', f'rank 3 was {BY_KILL}'),
    ('srun: error: h: task 1: Segmentation fault (core dumped)',
     'h: task 1: Segmentation fault (core dumped)'),
    ('srun: error: h: task 1: Exited with exit code 1', ''),
    ('srun: error: Node failure on node1\nsrun: error: a: task 0: Killed',
     'Node failure on node1'),
    # A rank that is slow to die is told from those that are ended.
    (died('[h] 9,15\n[i] 7,0'),
     'rank 2 of 4, process 8 on host h, was killed by SIGBUS'),
    (died('[h] 0,256,139,0'),
     'rank 2 of 4, process 8 on host h, was killed by SIGSEGV'),
    (died('[h] 0,9,0\n[i] 0'), KILLED),
    (died('[h] 0,11,11,0'), 'one of ranks 1, 2 was killed by SIGSEGV'),
    (died('[h] 0,9,9,0'), f'one of ranks 1, 2 was {BY_KILL}'),
    (died('[h] 9,9,15,0'),
     'rank 2 of 4, process 8 on host h, was killed by SIGTERM'),
    (died('[h] 0,9,768,9'), ''),
    ('[mpiexec@h] Exit codes: [h] 0,0,768,0', ''),
    # A job that stands still has died if ranks end it.
    (f'chainer_fp8pipe: {WHY}', ''),
    (f'{STILL}{WHY}\n{died("[h] 0,9,0")}', WHY),
    # Who is killed by the end of a job has not died.
    (FAULT + died('[h] 0,9,0'), '')])
def test_lines_say_who_died_or_why_the_job_stands_still(said, cause):
    output = JobOutput()
    shown(output, f'{LINES}{said}\n')
    output.has_died()
    assert output.cause == cause
    if '768' in said:       # it has ended by itself
        assert (output.failed, output.error) == ('rank 2 of 4', 'exit code 3')


def test_the_first_exception_is_the_failure():
    output = JobOutput()
    assert shown(output, FAULT) == ''
    assert output.failed == 'rank 3 of 4'
    assert output.error == 'my.module.Trouble: it is broken: zwölfmal'
    # The same failure is of one type, whatever its text.
    assert ending_of(output, 1, True).failure == 'my.module.Trouble'


@pytest.mark.parametrize(('known', 'code', 'has_hosts', 'cause', 'failure'), [
    ({}, 0, False, 'its end, in order', ''),
    ({}, 3, False, 'exit code 3', 'exit code 3'),
    # With hosts that may be a network's.
    ({}, 255, True, 'exit code 255', ''),
    ({}, 2, True, 'exit code 2', 'exit code 2'),
    ({}, -9, False, 'what starts the ranks was killed by SIGKILL', ''),
    ({}, -40, False, 'what starts the ranks was killed by signal 40', ''),
    ({'cause': 'rank 1 was killed'}, 9, False, 'rank 1 was killed', ''),
    ({'failed': 'rank 1 of 2', 'error': 'KeyError: 1'}, 1, False,
     'rank 1 of 2: KeyError: 1', 'KeyError')])
def test_the_cause_is_who_has_died_or_what_failed(known, code, has_hosts,
                                                  cause, failure):
    output = JobOutput()
    vars(output).update(known)
    found = ending_of(output, code, has_hosts)
    assert (found.cause, found.failure) == (cause, failure)
