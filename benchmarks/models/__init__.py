"""Models as people write them, to try on them what should work on any.

``MODELS`` has a ``Case`` for each by its name.  Nothing here was written
for a model that is divided: these are chains that define by run, each in a
style of its own.
"""
from . import encoder, sequences, vision, zoo
from .case import Case

__all__ = ['MODELS', 'Case']

MODELS = {case.name: case for module in (vision, sequences, encoder, zoo)
          for case in module.CASES}
