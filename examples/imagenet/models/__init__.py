"""The networks that ``train_imagenet.py`` knows, by the names of ``--arch``.

Each takes ``classes`` and ``insize``, the height and width of its images, and
has its usual one as ``Network.insize``.  Images are float, of shape (N, 3,
insize, insize); scores have shape (N, classes).
"""
from .caffenet import CaffeNet
from .googlenet import GoogLeNet
from .resnet50 import ResNet50
from .small import Small

NETWORKS = {'resnet50': ResNet50, 'caffenet': CaffeNet,
            'googlenet': GoogLeNet, 'small': Small}
