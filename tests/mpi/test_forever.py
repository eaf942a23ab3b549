"""What is kept forever outlives the interpreter."""
import subprocess
import sys

import pytest

SCRIPT = '''
import sys
from chainer_fp8pipe.mpi.forever import keep_forever

class Memory:
    def __del__(self, write=sys.stdout.write, flush=sys.stdout.flush):
        write('freed')
        flush()

class Owner:
    def __init__(self):
        self.memory = [Memory()]
        self.owner = self

owner = Owner()
if sys.argv[1] == 'kept':
    keep_forever(owner)
'''


@pytest.mark.parametrize(('how', 'printed'), [('kept', ''),
                                              ('not', 'freed')])
def test_a_kept_object_is_never_freed(how, printed):
    done = subprocess.run([sys.executable, '-c', SCRIPT, how], text=True,
                          capture_output=True, check=True)
    assert done.stdout == printed
