"""Says why there is no GPU to a user who asked for one."""
import importlib.util


def explain_no_gpu() -> str | None:
    """Why Chainer cannot use a GPU here, with the remedy; None if it can.

    Chainer itself keeps silent about it: ``chainer.backends.cuda.available``
    is False, whatever the reason.
    """
    if importlib.util.find_spec('cupy') is None:
        return ("CuPy is not installed: pip install 'chainer_fp8pipe[cuda13]'"
                ' (or [cuda12], after the CUDA version of the driver)')
    from chainer.backends import cuda
    if not cuda.available:
        return ('CuPy is installed but does not import (are the CUDA libraries'
                ' there? They come with the extra chainer_fp8pipe[cuda13]): '
                f'{cuda._resolution_error}')
    try:
        count = cuda.cupy.cuda.runtime.getDeviceCount()
    except cuda.cupy.cuda.runtime.CUDARuntimeError as error:
        return f'CuPy is installed but finds no usable GPU: {error}'
    return None if count else 'CuPy is installed but this machine has no GPU'


def require_gpu() -> None:
    """Raises RuntimeError with the reason if Chainer cannot use a GPU."""
    reason = explain_no_gpu()
    if reason is not None:
        raise RuntimeError(f'No GPU can be used. {reason}')
