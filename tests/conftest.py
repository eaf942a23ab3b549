"""What pytest does before it looks for tests, and whether there is a GPU."""
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ['tests.digits_runs']

# Some machines keep Python from writing byte code.  The ranks that tests
# start, by the hundred, would then compile this package each for itself.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
sys.dont_write_bytecode = False

# The same commit gives the same answer, on every machine and on any day: no
# example is drawn, and none is remembered from an earlier run.
# How long it takes depends on what else the machine does: nothing fails by it.
PATIENT = {'deadline': None, 'suppress_health_check': [HealthCheck.too_slow]}
settings.register_profile('same', derandomize=True, database=None, **PATIENT)
# make explore: other examples each time; those that fail are remembered.
settings.register_profile('explore', max_examples=1000, print_blob=True,
                          **PATIENT)
settings.load_profile('same')


@pytest.fixture
def real():
    """Skips the test where there is no GPU."""
    cupy = pytest.importorskip('cupy', reason='CuPy is not installed')
    if not cupy.cuda.is_available():
        pytest.skip('CuPy finds no GPU')
