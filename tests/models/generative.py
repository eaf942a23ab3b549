"""Autoencoders, densities and other models of the input itself."""
from __future__ import annotations

import math

import chainer
import chainer.distributions as D
import chainer.functions as F
import chainer.links as L
import numpy
from chainer.functions.loss.vae import gaussian_kl_divergence

from .inputs import Case, arrays, bits, floats, integers, net


class VAE(chainer.Chain):
    """Several samples of the latent variable, as in Chainer's example."""

    def __init__(self, n_in=20, n_latent=4, n_h=16, k=2, beta=1.):
        super().__init__()
        self.k = k
        self.beta = beta
        with self.init_scope():
            self.le1 = L.Linear(n_in, n_h)
            self.le2_mu = L.Linear(n_h, n_latent)
            self.le2_ln_var = L.Linear(n_h, n_latent)
            self.ld1 = L.Linear(n_latent, n_h)
            self.ld2 = L.Linear(n_h, n_in)

    def encode(self, x):
        h1 = F.tanh(self.le1(x))
        return self.le2_mu(h1), self.le2_ln_var(h1)

    def decode(self, z, sigmoid=True):
        h2 = self.ld2(F.tanh(self.ld1(z)))
        return F.sigmoid(h2) if sigmoid else h2

    def forward(self, x):
        mu, ln_var = self.encode(x)
        rec_loss = 0
        for _ in range(self.k):
            z = F.gaussian(mu, ln_var)
            rec_loss += F.bernoulli_nll(x, self.decode(z, sigmoid=False)) \
                / (self.k * len(x))
        self.rec_loss = rec_loss
        self.loss = rec_loss + self.beta * gaussian_kl_divergence(
            mu, ln_var) / len(x)
        chainer.report({'rec_loss': rec_loss, 'loss': self.loss},
                       observer=self)
        return self.loss


@net(lambda n_in, n_latent: dict(
    linear=L.Linear(n_in, 16), mu=L.Linear(16, n_latent),
    ln_sigma=L.Linear(16, n_latent)))
def Encoder(self, x):
    h = F.tanh(self.linear(x))
    return D.Normal(loc=self.mu(h), log_scale=self.ln_sigma(h))


class Likelihood(chainer.Chain):
    def __init__(self, n_latent, n_out):
        super().__init__()
        with self.init_scope():
            self.linear = L.Linear(n_latent, 16)
            self.output = L.Linear(16, n_out)

    def forward(self, z):
        """Distributions go from link to link, not variables."""
        n_batch_axes = z.ndim - 1
        h = F.tanh(self.linear(z, n_batch_axes=n_batch_axes))
        h = self.output(h, n_batch_axes=n_batch_axes)
        return D.Independent(D.Bernoulli(logit=h), 1)


class Prior(chainer.Link):
    def __init__(self, n_latent):
        super().__init__()
        self.loc = numpy.zeros(n_latent, 'f')
        self.scale = numpy.ones(n_latent, 'f')
        self.register_persistent('loc')
        self.register_persistent('scale')

    def forward(self):
        return D.Independent(D.Normal(self.loc, scale=self.scale), 1)


@net(lambda n_in=20, n_latent=4: dict(
    encoder=Encoder(n_in, n_latent), decoder=Likelihood(n_latent, n_in),
    prior=Prior(n_latent)))
def DistributionsVAE(self, x):
    """The same with ``chainer.distributions``."""
    q_z = D.Independent(self.encoder(x), 1)
    z = q_z.sample(2)
    p_x = self.decoder(z)
    reconstruction = F.mean(p_x.log_prob(
        F.broadcast_to(x[None], (2, *x.shape))))
    penalty = F.mean(chainer.kl_divergence(q_z, self.prior()))
    loss = -(reconstruction - penalty)
    chainer.report({'loss': loss, 'penalty': penalty,
                    'reconstruction': reconstruction}, self)
    return loss


@net(lambda: dict(
    conv1=L.Convolution2D(1, 8, 3, pad=1, nobias=True),
    conv2=L.Convolution2D(8, 4, 3, pad=1, nobias=True),
    deconv2=L.Deconvolution2D(4, 8, 3, pad=1, nobias=True),
    deconv1=L.Deconvolution2D(8, 1, 4, stride=2, pad=1, nobias=True)))
def ConvolutionalAutoencoder(self, x):
    """Unpooling and deconvolution; no link has a bias."""
    h = F.max_pooling_2d(F.relu(self.conv1(x)), 2)
    h = F.average_pooling_2d(F.relu(self.conv2(h)), 2)
    h = F.unpooling_2d(h, 2, cover_all=False)
    h = self.deconv1(F.relu(self.deconv2(h)))
    return F.mean_squared_error(h, x)


@net(lambda: dict(
    down=L.Convolution2D(1, 8, 3, pad=1), up=L.Convolution2D(8, 1, 3, pad=1)))
def Indices(self, x):
    """Where the maximum was tells where to put it back."""
    h = F.leaky_relu(self.down(x))
    pooled, indices = F.max_pooling_2d(h, 2, return_indices=True)
    h = F.upsampling_2d(pooled, indices, ksize=2,
                        outsize=h.shape[2:])
    return F.mean_absolute_error(self.up(h), x)


@net(lambda n_in=20, n_h=12: dict(
    encoder=L.Linear(n_in, n_h), bias=chainer.Parameter(0, (n_in,))))
def Denoising(self, x):
    """NumPy's noise; the decoder is the encoder transposed."""
    noisy = x
    if chainer.config.train:
        noise = self.xp.random.normal(0, .3, x.shape)
        noisy = x + noise.astype(x.dtype)
    h = F.sigmoid(self.encoder(noisy))
    y = F.linear(h, self.encoder.W.T, self.bias)
    return F.mean((y - x) ** 2)


@net(lambda n_in=3, n_h=12, components=3: dict(
    hidden=L.Linear(n_in, n_h), parameters=L.Linear(n_h, 3 * components)))
def MixtureDensity(self, x, t):
    """Its loss is made of operators and a logsumexp."""
    pi, mu, ln_sigma = F.split_axis(
        self.parameters(F.tanh(self.hidden(x))), 3, axis=1)
    t = F.broadcast_to(F.reshape(t, (-1, 1)), mu.shape)
    z = (t - mu) * F.exp(-ln_sigma)
    log_density = -.5 * z * z - ln_sigma - .5 * math.log(2 * math.pi)
    return -F.mean(F.logsumexp(F.log_softmax(pi) + log_density, axis=1))


@net(lambda size, flip: dict(
    flip=flip,
    net=chainer.Sequential(L.Linear(size // 2, 16), F.tanh, L.Linear(16,
        size))))
def Coupling(self, x):
    a, b = F.split_axis(x, 2, axis=1)
    if self.flip:
        a, b = b, a
    scale, shift = F.split_axis(self.net(a), 2, axis=1)
    scale = F.tanh(scale)
    b = b * F.exp(scale) + shift
    x = F.concat((b, a) if self.flip else (a, b))
    return x, F.sum(scale, axis=1)


class Flow(chainer.ChainList):
    """RealNVP: links that return a value and its volume."""

    def __init__(self, size=6, layers=4):
        super().__init__(*(Coupling(size, i % 2) for i in range(layers)))

    def forward(self, x):
        volume = 0
        for layer in self.children():
            x, change = layer(x)
            volume = volume + change
        log_prob = -.5 * F.sum(F.square(x), axis=1) + volume
        loss = -F.average(log_prob)
        chainer.report({'loss': loss, 'volume': F.average(volume)}, self)
        return loss


@net(lambda n_in=12, size=4, codes=8: dict(
    encoder=L.Linear(n_in, size),
    codes=L.EmbedID(codes, size, initialW=chainer.initializers.Uniform(1)),
    decoder=L.Linear(size, n_in)))
def VectorQuantised(self, x):
    """The nearest code is found in NumPy, gradients go straight through."""
    z = self.encoder(x)
    distance = ((z.array[:, None] - self.codes.W.array) ** 2).sum(axis=2)
    e = self.codes(distance.argmin(axis=1).astype('i'))
    straight = z + (e.array - z.array)
    reconstruction = F.mean_squared_error(self.decoder(straight), x)
    codebook = F.mean_squared_error(e, z.array)
    commitment = F.mean_squared_error(z, e.array)
    chainer.report({'reconstruction': reconstruction,
                    'codebook': codebook}, self)
    return reconstruction + codebook + .25 * commitment


class Made(chainer.Chain):
    """Autoregressive: weights are masked before they are used."""

    def __init__(self, n_in=10, n_h=20):
        super().__init__()
        order = numpy.arange(n_in)
        hidden = numpy.arange(n_h) % (n_in - 1)
        self.add_persistent(
            'mask1', (hidden[:, None] >= order).astype('f'))
        self.add_persistent(
            'mask2', (order[:, None] > hidden).astype('f'))
        with self.init_scope():
            self.l1 = L.Linear(n_in, n_h)
            self.l2 = L.Linear(n_h, n_in)

    def forward(self, x):
        h = F.relu(F.linear(x, self.l1.W * self.mask1, self.l1.b))
        y = F.linear(h, self.l2.W * self.mask2, self.l2.b)
        return F.sigmoid_cross_entropy(y, x.astype('i'))


class Discrete(chainer.Chain):
    """A latent variable of classes, by Gumbel's softmax; keeps a count."""

    def __init__(self, n_in=12, classes=6):
        super().__init__()
        with self.init_scope():
            self.encoder = L.Linear(n_in, classes)
            self.decoder = L.Linear(classes, n_in)
        self.add_persistent('steps', 0)

    @property
    def temperature(self):
        return max(.5, .99 ** self.steps)

    def forward(self, x):
        if chainer.config.train:
            self.steps += 1
        logits = self.encoder(x)
        z = F.gumbel_softmax(F.log_softmax(logits), self.temperature)
        p = F.softmax(logits)
        entropy = -F.mean(F.sum(p * F.log(p + 1e-8), axis=1))
        loss = F.bernoulli_nll(x, self.decoder(z)) / x.size
        chainer.report({'loss': loss, 'entropy': entropy}, self)
        return loss - .01 * entropy


class Penalised(chainer.Chain):
    """A critic whose gradient by its input is part of its loss."""

    def __init__(self, n_in=8, n_h=16):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(n_in, n_h)
            self.l2 = L.Linear(n_h, 1)

    def critic(self, x):
        return self.l2(F.tanh(self.l1(x)))

    def forward(self, real, fake):
        x = chainer.Variable((real + fake) / 2)
        gradient, = chainer.grad([self.critic(x)], [x],
                                 enable_double_backprop=True)
        norm = F.sqrt(F.batch_l2_norm_squared(gradient) + 1e-8)
        penalty = F.mean_squared_error(norm, self.xp.ones_like(norm.array))
        distance = F.mean(self.critic(fake)) - F.mean(self.critic(real))
        chainer.report({'distance': distance, 'penalty': penalty}, self)
        return distance + 10 * penalty


@net(lambda classes=5, n_z=4: dict(
    n_z=n_z, embed=L.EmbedID(classes, 4), fc=L.Linear(n_z + 4, 4 * 3 * 3),
    bn=L.BatchNormalization(4), deconv=L.Deconvolution2D(4 + 4, 1, 4, 2, 1)))
def Conditional(self, image, label):
    """A class is broadcast over a map of noise, which is drawn within."""
    n = len(image)
    z = self.xp.random.uniform(-1, 1, (n, self.n_z)).astype('f')
    e = self.embed(label)
    h = F.reshape(self.fc(F.hstack((z, e))), (n, 4, 3, 3))
    h = F.relu(self.bn(h))
    h = F.concat((h, F.broadcast_to(e[:, :, None, None], h.shape)))
    return F.mean_squared_error(F.tanh(self.deconv(h)), F.tanh(image))


CASES = [
    Case('vae', VAE, arrays(bits(20)), draws=True),
    Case('distributions_vae', DistributionsVAE, arrays(bits(20)),
         draws=True),
    Case('convolutional_autoencoder', ConvolutionalAutoencoder,
         arrays(floats(1, 8, 8))),
    Case('pooling_indices', Indices, arrays(floats(1, 8, 8))),
    Case('denoising', Denoising, arrays(floats(20)), draws=True),
    Case('mixture_density', MixtureDensity, arrays(floats(3), floats())),
    Case('flow', Flow, arrays(floats(6))),
    Case('vector_quantised', VectorQuantised, arrays(floats(12))),
    Case('made', Made, arrays(bits(10))),
    Case('discrete', Discrete, arrays(bits(12)), draws=True, stateful=True),
    Case('gradient_penalty', Penalised, arrays(floats(8), floats(8))),
    Case('conditional', Conditional, arrays(floats(1, 6, 6), integers(5)),
         draws=True),
]
