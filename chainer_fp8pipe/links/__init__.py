"""Links for pipelines: models that can be cut, and layers that allow it."""
from .divisible import Divisible
from .dropout import Dropout
from .lazy import lazy

__all__ = ['Divisible', 'Dropout', 'lazy']
