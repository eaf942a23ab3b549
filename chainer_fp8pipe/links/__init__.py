"""Links for pipelines: models that can be cut, and layers that allow it."""
from .divisible import Divisible, lazy

__all__ = ['Divisible', 'lazy']
