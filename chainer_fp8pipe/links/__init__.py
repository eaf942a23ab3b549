"""Links for pipelines: models that can be cut, and layers that allow it."""
from .divisible import Divisible, lazy
from .dropout import Dropout

__all__ = ['Divisible', 'Dropout', 'lazy']
