"""Gradients to bytes and back: floats, fp8 by ratio, records of few bits."""
from .codec import BlockScaled, Cast, Codec, Part, State
from .fp8_ratio import Fp8Ratio
from .tensors import Tensors

__all__ = ['BlockScaled', 'Cast', 'Codec', 'Fp8Ratio', 'Part', 'State',
           'Tensors']
