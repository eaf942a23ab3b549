import os
import re
import signal
import subprocess
import sys

from chainer_fp8pipe.mpi.failure._witness_process import _Rank
from chainer_fp8pipe.mpi.failure.dumped_stack import dumped_stack

import pytest

from tests.images.processes import eventually

SCRIPT = """
import chainer_fp8pipe, re, sys
from chainer_fp8pipe.mpi.failure.dumped_stack import register
print(register(), flush=True)
match = re.compile('(a+)+$').match
def hold():
    # The compiled engine keeps the interpreter's lock.
    match('a' * 60 + 'b')
hold()
"""


@pytest.mark.skipif(not hasattr(os, 'pidfd_open'), reason='not on Linux')
def test_a_process_whose_interpreter_is_held_writes_its_stack(tmp_path):
    path = tmp_path / 'script.py'
    path.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, str(path)],
                          stdout=subprocess.PIPE, text=True) as process:
        try:
            _, number, file = process.stdout.readline().split()
            rank = _Rank(process.pid)
            rank.stack = int(number), int(file)

            def is_in_hold():
                rank.write_stack()
                found = dumped_stack(rank.written_stack())
                return found is not None and found.place.endswith('in hold')
            assert eventually(is_in_hold)
            found = dumped_stack(rank.written_stack())
            assert re.search(r'in <module>\n.*in hold\n$', found.text)
            assert found.call == ''
        finally:
            process.kill()
    os.close(rank.pidfd)
    assert int(number) in range(signal.SIGRTMIN, signal.SIGRTMAX)


def test_the_call_of_mpi_is_read_from_the_file(tmp_path):
    path = tmp_path / 'script.py'
    path.write_text('one()\nworld.allreduce(2)\n')
    dump = ('Current thread 0x1 (most recent call first):\n'
            f'  File "{path}", line 1 in <module>\n'
            'Current thread 0x1 (most recent call first):\n'
            f'  File "{path}", line 2 in work\n'
            f'  File "{path}", line 1 in <module>\n')
    found = dumped_stack(dump)
    assert (found.call, found.place) == ('allreduce', 'script.py:2 in work')
    assert found.text.endswith('line 2, in work\n')


@pytest.mark.parametrize('text', ['', 'nonsense', 'most recent call first'])
def test_nothing_written_is_no_stack(text):
    assert dumped_stack(text) is None
