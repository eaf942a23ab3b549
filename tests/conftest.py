"""What pytest does before it looks for tests."""
import os
import sys

from hypothesis import settings

# Some machines keep Python from writing byte code.  The ranks that tests
# start, by the hundred, would then compile this package each for itself.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
sys.dont_write_bytecode = False

# The same commit gives the same answer, on every machine and on any day: no
# example is drawn, and none is remembered from an earlier run.
settings.register_profile('same', derandomize=True, database=None)
# make explore: other examples each time; those that fail are remembered.
settings.register_profile('explore', max_examples=1000, print_blob=True)
settings.load_profile('same')
