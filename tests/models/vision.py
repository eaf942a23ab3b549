"""Images to labels, in many of the ways that Chainer's users write."""
from __future__ import annotations

from functools import partial

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import initializers

from .inputs import Case, arrays, bits, floats, integers, net, some


class DoubleConv(chainer.Chain):
    def __init__(self, n_in, n_out):
        super().__init__()
        with self.init_scope():
            self.c0 = L.Convolution2D(n_in, n_out, 3, pad=1)
            self.c1 = L.Convolution2D(n_out, n_out, 3, pad=1)

    def __call__(self, x):
        return F.relu(self.c1(F.relu(self.c0(x))))


class UNet(chainer.Chain):
    """Every level of the way down is concatenated on the way up."""

    def __init__(self, channels=4, levels=3, classes=4):
        super().__init__()
        widths = [channels << level for level in range(levels + 1)]
        with self.init_scope():
            self.bottom = DoubleConv(widths[-2], widths[-1])
            self.last = L.Convolution2D(widths[0], classes, 1)
        self.levels = levels
        for level in range(levels):
            n_in = widths[level - 1] if level else 3
            self.add_link(f'down{level}', DoubleConv(n_in, widths[level]))
            self.add_link(f'deconv{level}', L.Deconvolution2D(
                widths[level + 1], widths[level], 2, stride=2))
            self.add_link(f'up{level}', DoubleConv(
                2 * widths[level], widths[level]))

    def forward(self, x, t):
        skips = []
        h = x
        for level in range(self.levels):
            h = self[f'down{level}'](h)
            skips.append(h)
            h = F.max_pooling_2d(h, 2)
        h = self.bottom(h)
        for level in reversed(range(self.levels)):
            h = F.concat((self[f'deconv{level}'](h), skips.pop()), axis=1)
            h = self[f'up{level}'](h)
        y = self.last(h)
        self.loss = F.softmax_cross_entropy(y, t)
        self.accuracy = F.accuracy(y, t)
        chainer.report({'loss': self.loss, 'accuracy': self.accuracy}, self)
        return self.loss


class DenseBlock(chainer.ChainList):
    def __init__(self, n_in, growth, layers):
        super().__init__()
        for layer in range(layers):
            self.add_link(L.BatchNormalization(n_in + layer * growth))
            self.add_link(L.Convolution2D(
                n_in + layer * growth, growth, 3, 1, 1, nobias=True))

    def forward(self, x, dropout):
        links = list(self.children())
        for bn, conv in zip(links[::2], links[1::2], strict=True):
            h = F.dropout(conv(F.relu(bn(x))), dropout)
            x = F.concat((x, h))
        return x


class DenseNet(chainer.Chain):
    """Each layer sees all the layers before it."""

    def __init__(self, growth=4, layers=3, blocks=2, classes=10):
        super().__init__()
        self.blocks = blocks
        n = 2 * growth
        with self.init_scope():
            self.conv = L.Convolution2D(3, n, 3, 1, 1)
            for block in range(blocks):
                setattr(self, f'dense{block}', DenseBlock(n, growth, layers))
                n += growth * layers
                setattr(self, f'trans{block}', L.Convolution2D(n, n // 2, 1))
                n //= 2
            self.fc = L.Linear(n, classes)

    def forward(self, x):
        h = self.conv(x)
        for block in range(self.blocks):
            h = getattr(self, f'dense{block}')(h, dropout=.1)
            h = F.average_pooling_2d(getattr(self, f'trans{block}')(h), 2)
        h = F.average_pooling_2d(h, h.shape[2:])
        return self.fc(h)


class PreActivation(chainer.Chain):
    def __init__(self, width, stride):
        super().__init__()
        with self.init_scope():
            # Lazily shaped, both: the input's channels are not said.
            self.bn1 = L.BatchNormalization(axis=(0, 2, 3))
            self.conv1 = L.Convolution2D(None, width, 3, stride, 1,
                                         nobias=True)
            self.bn2 = L.BatchNormalization(width)
            self.conv2 = L.Convolution2D(width, width, 3, 1, 1, nobias=True)
            if stride > 1:
                self.shortcut = L.Convolution2D(None, width, 1, stride)

    def forward(self, x):
        h = F.relu(self.bn1(x))
        if hasattr(self, 'shortcut'):
            x = self.shortcut(h)
        h = self.conv1(h)
        h = self.conv2(F.relu(self.bn2(h)))
        return h + x


@net(lambda classes=10: dict(
    stem=L.Convolution2D(None, 8, 3, pad=1, nobias=True),
    blocks=chainer.Sequential(PreActivation(8, 1), PreActivation(16, 2),
        PreActivation(16, 1), PreActivation(32, 2)),
    bn=L.BatchNormalization(32, decay=.99, eps=1e-4),
    fc=L.Linear(None, classes)))
def PreActivationResNet(self, x):
    h = F.relu(self.bn(self.blocks(self.stem(x))))
    return self.fc(F.mean(h, axis=(2, 3)))


@net(lambda: dict(
    conv=L.Convolution2D(1, 4, 3), bn=L.BatchNormalization((4, 6, 6), axis=0),
    fc1=L.Linear(None, 32, nobias=True),
    bn1=L.BatchNormalization(32, use_beta=True, use_gamma=False),
    fc2=L.Linear(32, 10)))
def StatisticsPerPixel(self, x):
    """Batch normalisation over the samples alone, dropout after it."""
    h = F.leaky_relu(self.bn(self.conv(x)), .1)
    h = F.dropout(F.relu(self.bn1(self.fc1(h))), ratio=.3)
    return self.fc2(h)


class SqueezeExcitation(chainer.Chain):
    def __init__(self, channels, reduction=4):
        super(SqueezeExcitation, self).__init__()  # noqa: UP008, older code
        with self.init_scope():
            self.down = L.Linear(channels, channels // reduction)
            self.up = L.Linear(channels // reduction, channels)

    def __call__(self, x):
        n, c, h, w = x.shape
        s = F.reshape(F.average_pooling_2d(x, (h, w)), (n, c))
        s = F.sigmoid(self.up(F.relu(self.down(s))))
        s = F.broadcast_to(F.reshape(s, (n, c, 1, 1)), x.shape)
        return x * s


class SENet(chainer.Chain):
    """Old style: links are given to the constructor."""

    def __init__(self, width=8, classes=10):
        initializer = initializers.HeNormal()
        super().__init__(
            conv1=L.Convolution2D(3, width, 3, 2, 1, initialW=initializer),
            se1=SqueezeExcitation(width),
            conv2=L.Convolution2D(width, width, 3, 1, 1,
                                  initialW=initializer),
            norm=L.GroupNormalization(4),
            se2=SqueezeExcitation(width),
            fc=L.Linear(width, classes))

    def __call__(self, x):
        h = self.se1(F.relu(self.conv1(x)))
        h = F.relu(h + self.se2(self.norm(self.conv2(h))))
        return self.fc(F.average_pooling_2d(h, h.shape[2:]))


@net(lambda: dict(
    where=chainer.Sequential(L.Convolution2D(1, 4, 5), F.relu,
        partial(F.max_pooling_2d, ksize=2), L.Linear(None, 16), F.relu),
    theta=L.Linear(16, 6, initialW=initializers.Normal(.01),
        initial_bias=np.array([1, 0, 0, 0, 1, 0], 'f')),
    conv=L.Convolution2D(1, 8, 3), fc=L.Linear(None, 10)))
def SpatialTransformer(self, x):
    """Where to look is regressed; what is there is classified."""
    theta = self.theta(self.where(x)).reshape(-1, 2, 3)
    grid = F.spatial_transformer_grid(theta, (8, 8))
    h = F.spatial_transformer_sampler(x, grid)
    return self.fc(F.max_pooling_2d(F.relu(self.conv(h)), 2))


@net(lambda: dict(
    stem=L.Convolution2D(3, 8, 3, pad=1), a=L.Inception(8, 4, 4, 4, 2, 4, 4),
    b=L.InceptionBN(16, 4, 4, 4, 2, 4, 'avg', 4), fc=L.Linear(16, 10)))
def Inceptions(self, x):
    """Chainer's own Inception links, with and without normalisation."""
    h = F.relu(self.stem(x))
    h = F.max_pooling_2d(self.a(h), 3, stride=2)
    h = self.b(h)
    return self.fc(F.average(h, axis=(2, 3)))


class MobileNet(chainer.Chain):
    """Depthwise convolutions; blocks are kept in a list of names."""

    def __init__(self, width=8):
        super().__init__()
        self.names = []
        with self.init_scope():
            self.stem = L.Convolution2D(3, width, 3, 2, 1)
            for i in range(3):
                setattr(self, f'dw{i}', L.DepthwiseConvolution2D(
                    width, 1, 3, pad=1, nobias=True))
                setattr(self, f'bn{i}', L.BatchNormalization(width))
                setattr(self, f'pw{i}', L.Convolution2D(width, width, 1))
                self.names.append((f'dw{i}', f'bn{i}', f'pw{i}'))
            self.fc = L.Linear(width, 10)

    def forward(self, x):
        h = self.stem(x)
        for dw, bn, pw in self.names:
            h = h + self[pw](F.clipped_relu(self[bn](self[dw](h)), 6.))
        return self.fc(F.max(h, axis=(2, 3)))


class WeightStandardised(chainer.Chain):
    """Parameters of its own, which functions change before they are used."""

    def __init__(self, width=8):
        super().__init__()
        with self.init_scope():
            initial = initializers.LeCunNormal()
            self.W1 = chainer.Parameter(initial, (width, 3, 3, 3))
            self.gain = chainer.Parameter(1., (width, 1, 1, 1))
            self.W2 = chainer.Parameter(initial, (10, width))
            self.b = chainer.Parameter(np.zeros(10, 'f'))
            self.scale = L.Scale(axis=1, W_shape=(width,), bias_term=True)

    def forward(self, x):
        mean = F.mean(self.W1, axis=(1, 2, 3), keepdims=True)
        centred = self.W1 - F.broadcast_to(mean, self.W1.shape)
        deviation = F.sqrt(F.mean(centred ** 2, (1, 2, 3), keepdims=True))
        W1 = centred * F.broadcast_to(
            self.gain / (deviation + 1e-5), self.W1.shape)
        h = F.relu(self.scale(F.convolution_2d(x, W1, stride=2)))
        h = F.mean(h, axis=(2, 3))
        W2 = F.normalize(self.W2, axis=1)
        return F.matmul(h, W2, transb=True) + F.broadcast_to(
            self.b, (len(x), 10))


@net(lambda: dict(
    conv1=L.Convolution2D(3, 8, 5, stride=2),
    conv2=L.DilatedConvolution2D(8, 8, 3, pad=2, dilate=2),
    fc1=L.Linear(None, 32), fc2=L.Linear(32, 10)))
def Pyramid(self, x):
    """An AlexNet in small: normalised responses, pooled in a pyramid."""
    h = F.local_response_normalization(F.relu(self.conv1(x)))
    h = F.spatial_pyramid_pooling_2d(F.relu(self.conv2(h)), 3, 'max')
    return self.fc2(F.dropout(F.elu(self.fc1(h)), .5))


@net(lambda width=8, classes=5: dict(
    stages=chainer.ChainList(*(L.Convolution2D(None, width, 3, stride=2,
        pad=1) for _ in range(3))),
    lateral=chainer.ChainList(*(L.Convolution2D(width, width, 1) for _ in
        range(3))), head=L.Convolution2D(width, classes, 1)))
def Segmentation(self, image, label):
    """Features of three scales, resized and added; some pixels unlabelled."""
    maps = []
    for conv, side in zip(self.stages, self.lateral, strict=True):
        image = F.relu(conv(image))
        maps.append(side(image))
    total = sum(F.resize_images(m, label.shape[1:]) for m in maps)
    return F.softmax_cross_entropy(self.head(total), label,
                                   ignore_label=-1)


@net(lambda width=12: dict(
    conv1=L.Convolution2D(1, width, 3, pad=1),
    conv2=L.Convolution2D(width, 4, 3, pad=1)))
def SuperResolution(self, x, t):
    """Twice the size, by channels that become pixels."""
    h = self.conv2(F.softplus(self.conv1(x)))
    y = F.depth2space(h, 2) + F.resize_images(x, t.shape[2:])
    loss = F.mean_absolute_error(y, t)
    chainer.report({'loss': loss}, self)
    chainer.report({'psnr': -10 * F.log10(F.mean_squared_error(y, t))},
                   self)
    return loss


@net(lambda: dict(
    conv=L.Convolution2D(3, 8, 3, stride=2), image=L.Linear(None, 16),
    vector=L.Linear(5, 16), both=L.Bilinear(16, 16, 10)))
def TwoViews(self, image, vector, t):
    """An image and a vector, each with a branch of its own."""
    a = F.tanh(self.image(F.relu(self.conv(image))))
    b = F.tanh(self.vector(vector))
    y = self.both(a, b)
    loss = F.softmax_cross_entropy(y, t)
    chainer.report({'loss': loss, 'accuracy': F.accuracy(y, t)}, self)
    return loss


class Siamese(chainer.Chain):
    """The same links for both images."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(1, 4, 3)
            self.fc1 = L.Linear(None, 16)
            self.fc2 = L.Linear(16, 2)

    def embed(self, x):
        return self.fc2(F.relu(self.fc1(F.max_pooling_2d(
            F.relu(self.conv(x)), 2))))

    def forward(self, x0, x1, same):
        y0, y1 = self.embed(x0), self.embed(x1)
        loss = F.contrastive(y0, y1, same, margin=1)
        chainer.report({'loss': loss}, self)
        return loss


@net(lambda embedder: dict(embedder=embedder))
def Triplet(self, anchor, positive, negative):
    """One pass over three images stacked into one batch, then divided."""
    stacked = self.xp.concatenate((anchor, positive, negative))
    a, p, n = F.split_axis(self.embedder(stacked), 3, axis=0)
    return F.triplet(a, p, n, margin=.5)


@net(lambda: dict(
    trunk=chainer.Sequential(L.Convolution2D(3, 8, 3, stride=2), F.relu,
        L.Linear(None, 32), F.relu), cls=L.Linear(32, 10), box=L.Linear(32, 4),
    attribute=L.Linear(32, 3)))
def MultiTask(self, x, label, box, attribute):
    """Classes for all, boxes for all, attributes for some."""
    h = self.trunk(x)
    y = self.cls(h)
    losses = {
        'cls': F.softmax_cross_entropy(y, label),
        'box': F.mean(F.huber_loss(self.box(h), box, 1.)),
        'attribute': F.softmax_cross_entropy(
            self.attribute(h), attribute, ignore_label=-1)}
    total = 0
    for weight, loss in zip((1, .5, .25), losses.values(), strict=True):
        total += weight * loss
    chainer.report(losses, self)
    chainer.report({'loss': total, 'accuracy': F.accuracy(y, label)},
                   self)
    return total


@net(lambda: dict(
    conv1=L.Convolution2D(3, 8, 3, 2, 1),
    conv2=L.Convolution2D(8, 5, 3, 2, 1)))
def BatchedDetector(self, x, present, offset):
    """An objectness map, indexed; its loss is by sigmoid."""
    y = self.conv2(F.relu(self.conv1(x)))
    score, moved = y[:, 0], y[:, 1:]
    where = F.sigmoid_cross_entropy(score, present)
    mask = (present > 0)[:, None].astype('f')
    distance = F.absolute(F.tanh(moved) - offset)
    distance = F.sum(distance * self.xp.broadcast_to(
        mask, distance.shape)) / max(float(mask.sum()), 1)
    chainer.report({'where': where, 'distance': distance}, self)
    return where + .1 * distance


def _sequential_mlp():
    block = chainer.Sequential(L.Linear(None, 24), L.BatchNormalization(24),
                               F.relu)
    return chainer.Sequential(block.repeat(3), L.Linear(24, 10))


def _embedder():
    return chainer.Sequential(L.Linear(None, 24), F.tanh, L.Linear(24, 8))


def _classifier(network):
    return lambda: L.Classifier(network())


_IMAGES = arrays(floats(3, 16, 16), integers(10))
_DIGITS = arrays(floats(1, 8, 8), integers(10))

CASES = [
    Case('unet', UNet, arrays(floats(3, 16, 16), integers(4, 16, 16)),
         samples=4),
    Case('densenet', _classifier(DenseNet), _IMAGES, draws=True),
    Case('preactivation_resnet', _classifier(PreActivationResNet), _IMAGES),
    Case('statistics_per_pixel', _classifier(StatisticsPerPixel), _DIGITS,
         draws=True),
    Case('senet', _classifier(SENet), _IMAGES),
    Case('spatial_transformer', _classifier(SpatialTransformer),
         arrays(floats(1, 12, 12), integers(10))),
    Case('inceptions', _classifier(Inceptions), _IMAGES),
    Case('mobilenet', _classifier(MobileNet), _IMAGES),
    Case('weight_standardised', _classifier(WeightStandardised), _IMAGES),
    Case('pyramid', _classifier(Pyramid), _IMAGES, draws=True),
    Case('segmentation', Segmentation,
         arrays(floats(3, 16, 16), some(5, 16, 16))),
    Case('super_resolution', SuperResolution,
         arrays(floats(1, 8, 8), floats(1, 16, 16))),
    Case('two_views', TwoViews,
         arrays(floats(3, 8, 8), floats(5), integers(10))),
    Case('siamese', Siamese,
         arrays(floats(1, 8, 8), floats(1, 8, 8), integers(2))),
    Case('triplet', lambda: Triplet(_embedder()),
         arrays(floats(12), floats(12), floats(12))),
    Case('multi_task', MultiTask, arrays(floats(3, 8, 8), integers(10),
                                         floats(4), some(3))),
    Case('detector', BatchedDetector,
         arrays(floats(3, 16, 16), integers(2, 4, 4), bits(4, 4, 4))),
    Case('sequential', _classifier(_sequential_mlp), _DIGITS),
]
