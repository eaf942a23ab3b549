"""Gradients to bytes and back: ``float32``, ``float16`` and fp8 by ratio."""
from .cast import Cast
from .codec import Codec
from .fp8_ratio import Fp8Ratio
from .tensors import Tensors

__all__ = ['Cast', 'Codec', 'Fp8Ratio', 'Tensors']
