"""What pytest does before it looks for tests."""
from hypothesis import settings

# The same commit gives the same answer, on every machine and on any day: no
# example is drawn, and none is remembered from an earlier run.
settings.register_profile('same', derandomize=True, database=None)
# make explore: other examples each time; those that fail are remembered.
settings.register_profile('explore', max_examples=1000, print_blob=True)
settings.load_profile('same')
