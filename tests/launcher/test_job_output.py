"""What ranks say that the launcher acts upon, and how a start has ended."""
from chainer_fp8pipe.launcher.output import JobOutput, Lines, ending_of
from chainer_fp8pipe.report.launch_protocol import DONE, RANK, UPDATED

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
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
===========================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
'''
BY_KILL = 'killed by SIGKILL (the system does that when memory is short)'
KILLED = f'rank 1 of 4, process 7 on host h, was {BY_KILL}'
TRACE = '''
rank 3 of 4 failed, ending all:
Traceback (most recent call last):
  File "x.py", line 1, in <module>
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "x.py", line 3, in <module>
my.module.Trouble: it is broken: zwölfmal
Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort
'''
STILL = ('the job stands still: no rank has finished an update for 5 '
         'seconds; rank 1 is stopped')


def shown(output, text, size=10_000, encoding='utf-8'):
    """What is shown of a text that comes in pieces."""
    lines, data = Lines(output.look), text.encode(encoding)
    return b''.join(lines.feed(data[place:place + size]) for place
                    in range(0, len(data), size)).decode(encoding)


@pytest.mark.parametrize('size', [1, 7, 10_000])
def test_the_launcher_learns_of_updates_and_deaths(size, capfd):
    output = JobOutput()
    assert shown(output, LINES, size) == ''.join(
        line.partition(UPDATED)[0] for line in LINES.splitlines(True)
        if not line.startswith(RANK))
    assert shown(output, DIED, size) == DIED
    assert output.updates == [51, 52]
    assert output.cause == KILLED
    assert output.failed == output.error == ''
    assert capfd.readouterr().err.count('trains: update 51 is done') == 1


@pytest.mark.parametrize(('said', 'cause'), [
    # Open MPI's words, and Slurm's.
    ('mpirun noticed that process rank 1 with PID 7 on node h exited on '
     'signal 9 (Killed).', KILLED),
    ('mpirun noticed that process rank 2 with PID 0 on node localhost exited '
     'on signal 9 (Killed).', KILLED.replace('1', '2').replace('7', '8')),
    ('mpirun noticed that process rank 3 with PID 0 on node localhost exited '
     'on signal 9 (Killed).', f'rank 3 was {BY_KILL}'),
    ('srun: error: h: task 1: Segmentation fault (core dumped)',
     'h: task 1: Segmentation fault (core dumped)'),
    ('srun: error: h: task 1: Exited with exit code 1', ''),
    ('srun: error: Node failure on node1\nsrun: error: a: task 0: Killed',
     'Node failure on node1'),
    # A job that stands still has died if ranks end it.
    (f'chainer_fp8pipe: {STILL}', ''),
    (f'chainer_fp8pipe: {STILL}\nending all ranks with exit code 75', STILL),
    (f'chainer_fp8pipe: {STILL}\nending all ranks with exit code 75\n{DIED}',
     STILL),
    # Who is killed by the end of a job has not died.
    (TRACE + DIED, '')])
def test_lines_say_who_died_or_why_the_job_stands_still(said, cause):
    output = JobOutput()
    shown(output, f'{LINES}{said}\n')
    assert output.cause == cause


@pytest.mark.parametrize('size', [17, 10_000])
@pytest.mark.parametrize(('codes', 'number', 'said'), [
    ('[h] 9,15\n[i] 7,0\n', 15,
     'rank 2 of 4, process 8 on host h, was killed by SIGBUS'),
    ('[h] 0,256,139,0\n', 11,
     'rank 2 of 4, process 8 on host h, was killed by SIGSEGV'),
    ('[h] 0,9,0\n[i] 0\n', 9, KILLED),
    ('[h] 0,15,9,0\n', 15,
     f'rank 2 of 4, process 8 on host h, was {BY_KILL}'),
    ('[h] 0,11,11,0\n', 9, 'one of ranks 1, 2 was killed by SIGSEGV'),
    ('[h] 0,9,9,0\n', 9, f'one of ranks 1, 2 was {BY_KILL}'),
    ('[h] 15,9,9,0\n', 15, f'one of ranks 1, 2 was {BY_KILL}')])
def test_a_rank_that_is_slow_to_die_is_told_from_those_that_are_ended(
        codes, number, said, size):
    output = JobOutput()
    shown(output, LINES)
    before, last = DIED.partition('YOUR APPLICATION TERM')[::2]
    after = 'YOUR APPLICATION TERM' + last.replace('9', str(number))
    assert before + after == shown(
        output, f'{before}[mpiexec@h] Exit codes: {codes}{after}',
        10_000 if '\n[' in codes else size)
    assert output.cause == said


def test_a_rank_that_ends_by_itself_is_told_from_those_that_are_killed():
    output = JobOutput()
    shown(output, f'{LINES}[mpiexec@h] Exit codes: [h] 0,9,768,9\n{DIED}')
    assert (output.cause, output.failed, output.error) == (
        '', 'rank 2 of 4', 'exit code 3')


def test_ranks_of_two_hosts_may_be_processes_of_one_number():
    output = JobOutput()
    shown(output, f'{RANK}rank 0 of 2 = PID 7 on a\n{RANK}rank 1 of 2 = PID 7 '
          f'on b\n[mpiexec@a] Exit codes: [a] 11\n[b] 9\n{DIED}')
    assert output.cause == (
        'rank 0 of 2, process 7 on host a, was killed by SIGSEGV')


@pytest.mark.parametrize('after', [
    '', 'Aborted\ndone\nsaved: 3 files\n',
    'srun: error: node0: tasks 0-1: Killed\n'
    'srun: launch/slurm: _step_signal: Terminating StepId=1.1\n'])
def test_the_last_error_of_a_traceback_is_the_exception(after):
    output = JobOutput()
    assert shown(output, TRACE + after) == TRACE + after
    assert output.failed == 'rank 3 of 4'
    assert output.error == 'my.module.Trouble: it is broken: zwölfmal'


@pytest.mark.parametrize(('before', 'after', 'is_same'), [
    ('broken: zw', 'process 4711 is broken', True),
    ('my.module.Trouble', 'OSError', False)])
def test_the_same_failure_is_of_one_type_whatever_its_text(
        before, after, is_same):
    found = []
    for text in TRACE, TRACE.replace(before, after):
        output = JobOutput()
        shown(output, text)
        found.append(ending_of(output, 1, True).failure)
    assert (found[0] == found[1]) == is_same


def test_a_progress_bar_is_shown_as_it_comes():
    output = JobOutput()
    feed = Lines(output.look).feed
    bar = '█ 12 % [00:'.encode()
    for piece, said in (
            (bar, bar), (b'\r', b'\r'), (f'{UPDATED}5\n'.encode(), b''),
            (b'chainer_fp8', b''), (b'pipe is no message\nand', b'chainer_fp8'
             b'pipe is no message\nand'), (b' [mpiexec@a] err', b' '),
            (b'or\n', b'[mpiexec@a] error\n'),
            (f'last{DONE}\n{DONE}\n'.encode(), b'last')):
        assert feed(piece) == said
    assert output.updates == [5]
    assert output.done == 2


def output(**known):
    found = JobOutput()
    vars(found).update(known)
    return found


@pytest.mark.parametrize(('known', 'code', 'cause', 'failure'), [
    ({}, 0, 'its end, in order', ''),
    ({}, 3, 'exit code 3', 'exit code 3'),
    ({}, -9, 'what starts the ranks was killed by SIGKILL', ''),
    ({}, -40, 'what starts the ranks was killed by signal 40', ''),
    ({'cause': 'rank 1 was killed'}, 9, 'rank 1 was killed', ''),
    ({'failed': 'rank 1 of 2', 'error': 'KeyError: 1'}, 1,
     'rank 1 of 2: KeyError: 1', 'KeyError'),
    ({'failed': 'rank 1 of 2'}, 1, 'rank 1 of 2: an exception',
     'rank 1 of 2')])
def test_the_cause_is_who_has_died_or_what_failed(known, code, cause,
                                                  failure):
    found = ending_of(output(**known), code, False)
    assert (found.cause, found.failure) == (cause, failure)


def test_a_network_is_no_failure_of_the_script():
    assert ending_of(output(), 255, True).failure == ''
    assert ending_of(output(), 2, True).failure
