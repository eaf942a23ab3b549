"""Links for pipelines: models that can be cut, and layers that allow it."""
from .divisible.divisible import Divisible
from .divisible.lazy import lazy
from .dropout import Dropout

__all__ = ['Divisible', 'Dropout', 'lazy']
