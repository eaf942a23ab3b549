"""What ranks say that the launcher acts upon."""
from chainer_fp8pipe.launcher.job_output import JobOutput
from chainer_fp8pipe.report.going_on import UPDATED

import pytest

LINES = f'''chainer_fp8pipe: communicator 'fp8' in place of 'naive'
{UPDATED}51

chainer_fp8pipe: rank 1 of 4 (worker), process 7 on host h, was killed by \
SIGKILL in the middle of the job (08:22:52.328825)
chainer_fp8pipe: rank 2 of 4 (worker), process 8 on host h, was killed by \
SIGTERM in the middle of the job (08:22:52.400000)
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
'''
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


@pytest.mark.parametrize('size', [1, 7, 10_000])
def test_the_launcher_learns_of_updates_and_deaths(size):
    output = JobOutput()
    shown = ''.join(output.feed(LINES[place:place + size])
                    for place in range(0, len(LINES), size))
    assert output.update == 51
    assert output.dead == ('rank 1 of 4 (worker), process 7 on host h, was '
                           'killed by SIGKILL')
    assert output.failed == output.error == output.stalled == ''
    assert shown == LINES.replace(f'{UPDATED}51\n', '')


def test_the_last_error_of_a_traceback_is_the_exception():
    output = JobOutput()
    assert output.feed(TRACE) == TRACE
    assert output.failed == 'rank 3 of 4'
    assert output.error == 'my.module.Trouble: it is broken: twice'


def test_what_srun_says_after_a_traceback_is_no_exception():
    output = JobOutput()
    output.feed(f'{TRACE}srun: error: node0: tasks 0-1: Killed\n'
                'srun: launch/slurm: _step_signal: Terminating StepId=1.1\n')
    assert output.error == 'my.module.Trouble: it is broken: twice'


def test_a_node_that_slurm_has_lost_is_named():
    output = JobOutput()
    output.feed('srun: error: Node failure on node1\n'
                'srun: error: node0: tasks 0-1: Killed\n')
    assert output.dead == 'Node failure on node1'


def test_a_progress_bar_is_shown_as_it_comes():
    output = JobOutput()
    assert output.feed('12 %\r') == '12 %\r'
    assert output.feed('13 %\r') == '13 %\r'
    assert output.feed(f'{UPDATED}5\n') == f'{UPDATED}5\n'
    assert output.update == 5
    assert output.feed('chainer_fp8') == ''
    assert output.feed('pipe is no message\nand') == (
        'chainer_fp8pipe is no message\nand')


def test_only_the_first_update_is_that_after_the_start():
    output = JobOutput()
    output.feed(f'{UPDATED}5\n{UPDATED}9\n')
    assert (output.update, output.latest) == (5, 9)


@pytest.mark.parametrize('ends', [True, False])
def test_a_job_that_stands_still_has_died_if_ranks_end_it(ends):
    output = JobOutput()
    still = ('the job stands still: no rank has finished an update for 5 '
             'seconds; rank 1 is stopped')
    output.feed(f'chainer_fp8pipe: {still}\n')
    if ends:
        output.feed('ending all ranks with exit code 75\n')
    assert output.stalled == (still if ends else '')
