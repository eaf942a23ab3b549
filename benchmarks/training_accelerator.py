"""A network that computes elsewhere: its layers take time, but no processor.

So does one on a GPU: the processors are free for the exchange meanwhile.
Every layer sleeps in its forward and in its backward pass.
"""
from __future__ import annotations

import time

import chainer
import chainer.functions as F
import chainer.links as L

LAYERS = 8
WIDTH = 724             # 8 layers have 4.2 M parameters
BATCH = 2               # so that what is computed here takes next to nothing
FORWARD, BACKWARD = 5e-3, 10e-3         # seconds of a layer


class Elsewhere(chainer.FunctionNode):
    """The identity, which takes its time."""

    def forward(self, inputs):
        time.sleep(FORWARD)
        return inputs

    def backward(self, indexes, gradients):
        time.sleep(BACKWARD)
        return gradients


class Network(chainer.ChainList):
    """Called with a batch, it returns the loss."""

    def __init__(self):
        super().__init__(*(L.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, x, t):
        for layer in self:
            x, = Elsewhere().apply((F.relu(layer(x)),))
        return F.softmax_cross_entropy(x, t)


def torch_network():
    """The same for PyTorch; called with a batch, it returns the outputs."""
    import torch

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            time.sleep(FORWARD)
            return x.view_as(x)

        @staticmethod
        def backward(context, gradient):
            time.sleep(BACKWARD)
            return gradient

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

        def forward(self, x):
            for layer in self.layers:
                x = Function.apply(torch.relu(layer(x)))
            return x
    return Module()
