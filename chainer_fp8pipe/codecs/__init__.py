"""Gradients to bytes and back: floats, fp8 by ratio, records of few bits."""
from .codec import BlockScaled, Cast, Codec, State
from .fp8 import Fp8Paper, Fp8Ratio, TensorReport
from .table import CODECS, Row
from .tensors import Tensors

__all__ = ['CODECS', 'BlockScaled', 'Cast', 'Codec', 'Fp8Paper', 'Fp8Ratio',
           'Row', 'State', 'TensorReport', 'Tensors']
