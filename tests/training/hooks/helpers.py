"""One update of one parameter."""
import chainer
import numpy


def model_of(**arrays):
    """A chain with these parameters."""
    model = chainer.Chain()
    with model.init_scope():
        for name, array in arrays.items():
            setattr(model, name, chainer.Parameter(numpy.array(array)))
    return model


def step(hook, gradients, optimizer=None, scale=None, **arrays):
    """Changes of the parameters by one update, as float64.

    Args:
        hook: Added to the optimizer.
        gradients: By the parameter's name; unscaled.
        optimizer: Default: SGD with a rate of 1.
        scale: Of the loss.
        arrays: The parameters.
    """
    model = model_of(**arrays)
    optimizer = (optimizer or chainer.optimizers.SGD(1.0)).setup(model)
    if hook is not None:
        optimizer.add_hook(hook)
    for name, gradient in gradients.items():
        one = getattr(model, name)
        one.grad = (numpy.asarray(gradient, one.dtype)
                    * one.dtype.type(scale or 1))
        one._loss_scale = scale
    optimizer.update()
    return {name: getattr(model, name).array.astype(float)
            - numpy.asarray(array, float) for name, array in arrays.items()}
