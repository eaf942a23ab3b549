"""Models as people write them, to try on them what should work on any.

``MODELS`` has a ``Case`` for each by its name.  Nothing here was written
for a model that is divided: these are chains that define by run, each in a
style of its own.
"""
from . import encoder, generative, sequences, vectors, vision, zoo
from .inputs import Case

__all__ = ['MODELS', 'Case']

_MODULES = vectors, vision, sequences, encoder, generative, zoo

MODELS = {case.name: case for module in _MODULES for case in module.CASES}
