"""The digits as a file, which ranks read without scikit-learn."""
import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile

_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(
    __file__))), 'examples', 'digits')


@functools.cache
def digits():
    """The folder for ``--root``, made once: the import takes two seconds."""
    folder = tempfile.mkdtemp(prefix='digits-')
    atexit.register(shutil.rmtree, folder)
    subprocess.run(
        [sys.executable, '-c', 'import chainer_fp8pipe, data, sys\n'
         'data.save_digits(sys.argv[1])', os.path.join(folder, 'digits.npz')],
        cwd=_FOLDER, env={**os.environ, 'PYTHONPATH': os.pathsep.join(
            [os.path.join(_FOLDER, os.pardir, os.pardir), _FOLDER])},
        check=True)
    return folder
