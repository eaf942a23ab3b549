"""The demo: its table, and that nothing is left."""
import os
import signal
import subprocess

import pytest

from tests.images.processes import eventually
from tests.ranks import start_script

from .runs import EXAMPLES, module

demo = module('demo')
RUNS = [{'name': name, 'final': final, 'seconds': 7.0, 'bytes': 2000.0,
         'images': 599}
        for name, final in (('float32', 98.1), ('fp8', 97.5))]


@pytest.mark.parametrize(('in_memory', 'remark'), [
    (False, '4 hosts, measured'), (True, '4 ranks, measured')])
def test_the_table_has_five_lines(capsys, in_memory, remark):
    demo.print_table(RUNS, {'held': [4e6, 3e6], 'whole': 7e6}, in_memory)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line[26:46].split() for line in lines] == [
        ['float32', 'fp8'], ['7.0', 'never'], ['2', '2'],
        ['98.10', '97.50'], ['4', '3']]
    assert [line[46:].strip() for line in lines] == [
        '', remark, 'by each rank', 'one image of 599 is 0.17 points',
        'of 7 MB']


def start(out):
    return start_script(
        0, EXAMPLES / 'demo.py', '--out', out, preexec_fn=lambda:
        signal.signal(signal.SIGINT, signal.default_int_handler))


@pytest.mark.slow
def test_the_demo_is_short_and_ends_with_the_table(tmp_path):
    with start(tmp_path) as process:
        printed, errors = process.communicate(timeout=390)
    assert process.returncode == 0, errors
    lines = printed.splitlines()
    assert len(lines) + errors.count('\n') <= 60
    assert not set(printed + errors) & set('\r\x1b\b')
    assert lines[-5].split()[-3:] == ['float32', 'fp8', 'int4']


@pytest.mark.slow
@pytest.mark.parametrize('runs', [1, 3])
def test_an_interrupted_demo_leaves_no_process(tmp_path, runs):
    def left():
        return subprocess.run(['pgrep', '-f', tmp_path], text=True,
                              capture_output=True).stdout
    with start(tmp_path) as process:
        said = b''
        while said.count(b'a point per epoch .') < runs:
            said += os.read(process.stdout.fileno(), 999)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert eventually(lambda: not left())
