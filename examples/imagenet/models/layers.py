"""What networks have in common."""
import chainer
import chainer.functions as F
from chainer.utils.conv import get_conv_outsize


def response_normalisation(x):
    """Local response normalisation with the constants of Caffe's models.

    In float32 whatever ``x`` is, as squares soon leave float16.
    """
    dtype = chainer.as_variable(x).dtype
    # Caffe divides its alpha of 1e-4 by n.
    h = F.local_response_normalization(F.cast(x, 'float32'), n=5, k=1,
                                       alpha=2e-5, beta=0.75)
    return F.cast(h, dtype)


def outsize(size, *layers):
    """The side of an image after some layers.

    Args:
        size: Before them.
        layers: Side, stride and padding of each one's window, and whether a
            last window may hang over the edge, as in Chainer's max
            pooling.

    Raises:
        ValueError: The image is smaller than a window.
    """
    side = size
    for window, stride, padding, cover_all in layers:
        if side + 2 * padding < window:
            raise ValueError(f'an insize of {size} is too small for this '
                             f'network: a window of {window} x {window} '
                             f'finds {side} x {side}')
        side = get_conv_outsize(side, window, stride, padding, cover_all)
    return side
