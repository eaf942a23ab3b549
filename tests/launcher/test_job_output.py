"""What ranks say that the launcher acts upon, and how a start has ended."""
from chainer_fp8pipe.launcher.output import JobOutput, ending_of
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
my.module.Trouble: it is broken: twice
Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort
'''
STILL = ('the job stands still: no rank has finished an update for 5 '
         'seconds; rank 1 is stopped')


@pytest.mark.parametrize('size', [1, 7, 10_000])
def test_the_launcher_learns_of_updates_and_deaths(size):
    output = JobOutput()
    shown = ''.join(output.feed(LINES[place:place + size])
                    for place in range(0, len(LINES), size))
    for place in range(0, len(DIED), size):
        output.feed_printed(DIED[place:place + size].encode())
    assert (output.update, output.latest) == (51, 52)
    assert output.dead == KILLED
    assert output.failed == output.error == output.stalled == ''
    assert shown == ''.join(
        line.partition(UPDATED)[0] for line in LINES.splitlines(True)
        if not line.startswith(RANK))


@pytest.mark.parametrize('said', [
    # Open MPI's words, and Slurm's.
    'mpirun noticed that process rank 1 with PID 7 on node h exited on '
    'signal 9 (Killed).\n',
    'srun: error: h: task 1: Killed\n'])
def test_deaths_are_told_in_the_words_of_each_starter(said):
    output = JobOutput()
    output.feed(LINES + said)
    assert 'rank 1 ' in output.dead
    assert 'killed by SIGKILL' in output.dead


@pytest.mark.parametrize(('codes', 'number', 'said'), [
    ('[h] 9,15\n[i] 7,0', 15,
     'rank 2 of 4, process 8 on host h, was killed by SIGBUS'),
    ('[h] 0,9,0\n[i] 0', 9, KILLED),
    ('[h] 0,9,9,0', 9, f'one of ranks 1, 2 was {BY_KILL}'),
    ('[h] 15,9,9,0', 15, f'one of ranks 1, 2 was {BY_KILL}')])
def test_a_rank_that_is_slow_to_die_is_told_from_those_that_are_ended(
        codes, number, said):
    output = JobOutput()
    output.feed(LINES)
    before, last = DIED.partition('YOUR APPLICATION TERM')[::2]
    died = before + 'YOUR APPLICATION TERM' + last.replace('9', str(number))
    first, last = died.replace(
        'YOUR APPLICATION TERM', f'[mpiexec@h] Exit codes: {codes}\n'
        'YOUR APPLICATION TERM').encode().split(b'[h]')
    shown = b''.join(map(output.feed_printed, (
        first[:-14], first[-14:] + b'[h]', last[:3], last[3:])))
    assert output.dead == said
    assert shown == died.encode()


@pytest.mark.parametrize('before', [TRACE, f'chainer_fp8pipe: {STILL}\n'
                                    'ending all ranks with exit code 75\n'])
def test_who_is_killed_by_the_end_of_a_job_has_not_died(before):
    output = JobOutput()
    output.feed(LINES + before)
    output.feed_printed(DIED.encode())
    assert output.dead == ''


@pytest.mark.parametrize('after', [
    '', 'Aborted\ndone\nsaved: 3 files\n',
    'srun: error: node0: tasks 0-1: Killed\n'
    'srun: launch/slurm: _step_signal: Terminating StepId=1.1\n'])
def test_the_last_error_of_a_traceback_is_the_exception(after):
    output = JobOutput()
    assert output.feed(TRACE + after) == TRACE + after
    assert output.failed == 'rank 3 of 4'
    assert output.error == 'my.module.Trouble: it is broken: twice'
    assert output.where == 'my.module.Trouble x.py:3'


@pytest.mark.parametrize(('said', 'known'), [
    ('srun: error: Node failure on node1\n'
     'srun: error: node0: tasks 0-1: Killed\n',
     {'dead': 'Node failure on node1'}),
    # The first update is that after the start.
    (f'{UPDATED}5\n{UPDATED}9\n', {'update': 5, 'latest': 9}),
    # A job that stands still has died if ranks end it.
    (f'chainer_fp8pipe: {STILL}\n', {'stalled': ''}),
    (f'chainer_fp8pipe: {STILL}\nending all ranks with exit code 75\n',
     {'stalled': STILL}),
])
def test_lines_that_the_launcher_knows(said, known):
    output = JobOutput()
    output.feed(said)
    assert {name: getattr(output, name) for name in known} == known


@pytest.mark.parametrize(('before', 'after', 'is_same'), [
    ('broken: twice', 'process 4711 is broken', True),
    ('x.py", line 3', 'x.py", line 4', False),
    ('my.module.Trouble', 'OSError', False)])
def test_the_same_failure_is_of_one_type_and_place_whatever_its_text(
        before, after, is_same):
    first, second = JobOutput(), JobOutput()
    first.feed(TRACE)
    second.feed(TRACE.replace(before, after))
    assert first.error != second.error or before not in first.error
    assert (ending_of(first, 1, True).failure ==
            ending_of(second, 1, True).failure) == is_same


def test_ranks_that_have_ended_in_order_are_counted_and_not_shown():
    output = JobOutput()
    assert output.feed(f'{DONE}\nlast{DONE}\n') == 'last'
    assert output.done == 2


def test_a_progress_bar_is_shown_as_it_comes():
    output = JobOutput()
    assert output.feed('12 %\r') == '12 %\r'
    assert output.feed('13 %\r') == '13 %\r'
    assert output.feed(f'{UPDATED}5\n') == ''
    assert output.update == 5
    assert output.feed('chainer_fp8') == ''
    assert output.feed('pipe is no message\nand') == (
        'chainer_fp8pipe is no message\nand')


def output(**known):
    found = JobOutput()
    vars(found).update(known)
    return found


@pytest.mark.parametrize(('known', 'code', 'cause', 'failure'), [
    ({}, 0, 'its end, in order', ''),
    ({}, 3, 'exit code 3', 'exit code 3'),
    ({}, -9, 'what starts the ranks was killed by SIGKILL', ''),
    ({}, -40, 'what starts the ranks was killed by signal 40', ''),
    ({'dead': 'rank 1 was killed'}, 9, 'rank 1 was killed', ''),
    ({'dead': 'rank 0', 'stalled': 'it stands still'}, 75,
     'it stands still', ''),
    ({'failed': 'rank 1 of 2', 'error': 'KeyError: 1',
      'where': 'KeyError x.py:1'}, 1, 'rank 1 of 2: KeyError: 1',
     'KeyError x.py:1'),
    ({'failed': 'rank 1 of 2'}, 1, 'rank 1 of 2: an exception',
     'an exception'),
])
def test_the_cause_is_who_has_died_or_what_failed(known, code, cause,
                                                  failure):
    found = ending_of(output(**known), code, False)
    assert (found.cause, found.failure) == (cause, failure)


def test_a_network_is_no_failure_of_the_script():
    assert ending_of(output(), 255, True).failure == ''
    assert ending_of(output(), 2, True).failure
