"""Where the examples are, and their modules."""
import importlib
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / 'examples'


def module(name):
    """A module of the examples, which import each other from there."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))
