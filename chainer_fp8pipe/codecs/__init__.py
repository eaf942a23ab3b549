"""Gradients to bytes and back: floats, fp8 by ratio, records of few bits."""
from .codec import BlockScaled, Cast, Codec, Part, State
from .coding import Coding, Tensors
from .fp8_ratio import Fp8Ratio

__all__ = ['BlockScaled', 'Cast', 'Codec', 'Coding', 'Fp8Ratio', 'Part',
           'State', 'Tensors']
