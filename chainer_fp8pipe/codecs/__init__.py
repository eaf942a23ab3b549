"""Gradients to bytes and back: floats, fp8 by ratio, int4 in blocks."""
from .block_scaled import BlockScaled
from .cast import Cast
from .codec import Codec
from .fp8_ratio import Fp8Ratio
from .tensors import Tensors

__all__ = ['BlockScaled', 'Cast', 'Codec', 'Fp8Ratio', 'Tensors']
