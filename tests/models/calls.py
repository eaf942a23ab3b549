"""A small call of every function and link of Chainer, inside of a model.

``CALLS`` has one for each name of ``chainer.functions`` and
``chainer.links`` but for ``LEFT_OUT``.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import chainer
import chainer.functions as F
import chainer.links as L
import numpy

SAMPLES = 4                 # of a micro-batch: square matrices have as many


@dataclass(frozen=True)
class Call:
    """A call.

    Attributes:
        shapes: Of its arguments, per sample; they are between -1 and 1 and
            have gradients.
        run: ``run(model, *arguments)``; ``model.link`` is the link,
            ``model.t`` has a label from 0 to 2 of each sample.
        link: Makes the link; None: there is none.
    """

    shapes: tuple[tuple[int, ...], ...]
    run: Callable
    link: Callable | None = None


class Around(chainer.Chain):
    """A linear layer before, one after, and a loss."""

    def __init__(self, call):
        super().__init__()
        self.call, self.t = call, None
        with self.init_scope():
            self.before = chainer.ChainList(*[
                L.Linear(6, int(numpy.prod(shape)))
                for shape in call.shapes])
            if call.link is not None:
                self.link = call.link()
            self.after = L.Linear(None, 3)

    def forward(self, x, t):
        self.t = t
        arguments = [
            F.reshape(F.tanh(linear(x)), (len(x), *shape))
            for linear, shape in zip(self.before, self.call.shapes,
                                     strict=True)]
        found = flat(self.call.run(self, *arguments))
        # So that there is a gradient whatever the function does with it.
        found.append(arguments[0])
        h = F.concat([F.reshape(F.cast(one, 'f'), (1, -1))
                      for one in found], axis=1)
        return F.mean(F.tanh(self.after(h)) ** 2)


def flat(values):
    """The variables in lists and tuples; arrays become variables."""
    if isinstance(values, (list, tuple)):
        return [one for value in values for one in flat(value)]
    if values is None:
        return []
    return [chainer.as_variable(values)]


def _e(name, *arguments, **options):
    return Call(((5,),), lambda m, x: getattr(F, name)(
        x, *arguments, **options))


def _f(run, *shapes):
    return Call(shapes or ((5,),), run)


def _l(make, run=None, *shapes):
    return Call(shapes or ((5,),), run or (lambda m, *x: m.link(*x)), make)


_ONE_BY_ONE = [
    'absolute', 'arctan', 'ceil', 'clipped_relu', 'cos', 'cosh', 'crelu',
    'elu', 'erf', 'erfc', 'erfcx', 'exp', 'expm1', 'fix', 'flatten',
    'floor', 'hard_sigmoid', 'identity', 'leaky_relu', 'log_ndtr',
    'log_softmax', 'ndtr', 'normalize', 'relu', 'relu6', 'rrelu', 'selu',
    'sigmoid', 'sign', 'sin', 'sinh', 'softmax', 'softplus', 'square',
    'tan', 'tanh', 'fliplr', 'flipud', 'cumsum', 'cumprod', 'logsumexp',
    'max', 'min', 'mean', 'average', 'sum', 'prod', 'argmax', 'argmin',
    'squeeze', 'transpose', 'batch_l2_norm_squared', 'dropout',
    'gumbel_softmax', 'dstack', 'hstack', 'vstack', 'concat', 'stack']
_BELOW_1 = ['arccos', 'arcsin', 'arctanh', 'erfinv', 'log1p']
_POSITIVE = ['digamma', 'lgamma', 'log', 'log10', 'log2', 'rsqrt', 'sqrt']
_TWO = [
    'add', 'arctan2', 'fmod', 'maximum', 'minimum', 'squared_difference',
    'squared_error', 'absolute_error', 'mean_squared_error',
    'mean_absolute_error', 'cross_covariance', 'gaussian', 'huber_loss']
_JOINED = {'dstack', 'hstack', 'vstack', 'concat', 'stack'}

_IMAGE, _LINE, _SPACE = (2, 4, 4), (2, 6), (2, 3, 3, 3)


def _first(name):
    """Of a sequence of one argument."""
    return lambda m, x: getattr(F, name)([x, x * 2])


def _away(name):
    return lambda m, x: getattr(F, name)(x * .9)


def _up(name):
    return lambda m, x: getattr(F, name)(x + 1.5)


def _both(name):
    return lambda m, x, y: getattr(F, name)(x, y)


CALLS: dict[str, Call] = {name: _e(name) for name in _ONE_BY_ONE}
CALLS.update({name: _f(_first(name)) for name in _JOINED})
CALLS.update({name: _f(_away(name)) for name in _BELOW_1})
CALLS.update({name: _f(_up(name)) for name in _POSITIVE})
CALLS.update({name: _f(_both(name), (5,), (5,)) for name in _TWO})


def _square(m, x):
    """Positive definite matrices."""
    return F.matmul(x, x, transb=True) + numpy.eye(3, dtype='f')


def _right(m, x):
    """Scores of classes; none of these is without a sample."""
    return x[:, :3] + 3 * numpy.eye(3, dtype='f')[m.t]


def _boxes(count=2):
    return numpy.array([[index, 0, 0, 3, 3] for index in range(count)], 'f')


def _align(name, **options):
    return lambda m, x: getattr(F, name)(
        x, _boxes()[:, 1:], _boxes()[:, 0].astype('i'), outsize=2,
        spatial_scale=1., **options)


def _ones(*shape):
    return numpy.ones(shape, 'f')


def _steps(x):
    """(samples, steps, units) as a list of sequences."""
    return [x[index] for index in range(len(x))]


def _ws(x, count, shapes):
    """Weights for recurrent functions, made of an argument."""
    def one(shape):
        size = int(numpy.prod(shape))
        flat_x = F.flatten(x)
        return F.reshape(F.tile(flat_x, -(-size // flat_x.size))[:size],
                         shape)
    return [[one(shape) for shape in shapes] for _ in range(count)]


def _n_step(name, gates, cell=False, both=False, kind=None):
    """``F.n_step_*``: hidden state, cell, weights, biases, sequences."""
    ways = 2 if both else 1

    def run(m, x):
        h = numpy.zeros((ways, len(x), 3), 'f')
        ws = _ws(x, ways, [(3, 2)] * gates + [(3, 3)] * gates)
        bs = _ws(x, ways, [(3,)] * 2 * gates)
        states = (h, h) if cell else (h,)
        options = {} if kind is None else {'activation': kind}
        return getattr(F, name)(1, 0., *states, ws, bs, _steps(x),
                                **options)
    return Call(((3, 2),), run)


def _theta(m, x):
    """Small turns of a grid."""
    return x * .1 + numpy.array([[1, 0, 0], [0, 1, 0]], 'f')


def _ctc(m, x):
    n = len(x)
    return F.connectionist_temporal_classification(
        [x[:, index] for index in range(5)],
        numpy.array([[0, 1]] * n, 'i'), 2,
        numpy.full(n, 5, 'i'), numpy.full(n, 2, 'i'))


def _weighted(name, *shape, **options):
    return lambda m, x, w: getattr(F, name)(x, F.reshape(w[0], shape),
                                            **options)


for _n, _shape, _kernel in (
        ('1d', _LINE, (3,)), ('2d', _IMAGE, (3, 3)), ('3d', _SPACE, (2,) * 3),
        ('nd', _SPACE, (2,) * 3)):
    _size = 2 * int(numpy.prod(_kernel))
    for _name in 'average_pooling', 'max_pooling', 'unpooling':
        CALLS[f'{_name}_{_n}'] = Call((_shape,), _e(
            f'{_name}_{_n}', 2).run)
    CALLS[f'convolution_{_n}'] = _f(_weighted(
        f'convolution_{_n}', 1, 2, *_kernel), _shape, (_size,))
    CALLS[f'deconvolution_{_n}'] = _f(_weighted(
        f'deconvolution_{_n}', 2, 1, *_kernel), _shape, (_size,))
CALLS['convolution_2d'] = _f(_weighted(
    'convolution_2d', 1, 2, 3, 3, pad=1), _IMAGE, (18,))
CALLS.update({name: _f(_align(name), _IMAGE) for name in (
    'roi_average_align_2d', 'roi_average_pooling_2d', 'roi_max_align_2d',
    'roi_max_pooling_2d')})


def _judged(name):
    return lambda m, x: getattr(F, name)(_right(m, x), m.t)


CALLS.update({name: _f(_judged(name)) for name in (
    'precision', 'recall', 'f1_score', 'classification_summary')})
CALLS.update({
    'accuracy': _f(lambda m, x: F.accuracy(x, m.t)),
    'argmax_crf1d': _f(lambda m, x, c: F.argmax_crf1d(
        F.reshape(c[0], (3, 3)), [x[:, 0], x[:, 1]]), (2, 3), (9,)),
    'as_strided': _f(lambda m, x: F.as_strided(x, (4, 2), (5, 1), 0)),
    'batch_det': _f(lambda m, x: F.batch_det(_square(m, x)), (3, 3)),
    'batch_inv': _f(lambda m, x: F.batch_inv(_square(m, x)), (3, 3)),
    'batch_matmul': _f(_both('batch_matmul'), (2, 3), (3, 2)),
    'batch_normalization': _f(
        lambda m, x, g: F.batch_normalization(x, g[0], g[1]), (5,), (5,)),
    'batch_renormalization': _f(
        lambda m, x, g: F.batch_renormalization(
            x, g[0], g[1], 2., 1., running_mean=_ones(5),
            running_var=_ones(5)), (5,), (5,)),
    'bernoulli_nll': _f(
        lambda m, x, y: F.bernoulli_nll(F.sigmoid(x), y), (5,), (5,)),
    'bias': _f(lambda m, x, y: F.bias(x, y[0]), (5,), (5,)),
    'bilinear': _f(lambda m, x, y, w: F.bilinear(
        x, y, F.reshape(w[0], (3, 2, 2))), (3,), (2,), (12,)),
    'binary_accuracy': _f(lambda m, x: F.binary_accuracy(
        x[:, 0], m.t % 2)),
    'black_out': _f(lambda m, x, w: F.black_out(
        x, m.t, w, numpy.tile(numpy.array([[3, 2]], 'i'), (len(x), 1))),
        (5,), (5,)),
    'broadcast': _f(lambda m, x, y: F.broadcast(x, y), (5,), (1,)),
    'broadcast_to': _f(lambda m, x: F.broadcast_to(x, (2, 4, 5))),
    'cast': _e('cast', 'd'),
    'cholesky': _f(lambda m, x: F.cholesky(
        F.matmul(x, x, transb=True) + numpy.eye(4, dtype='f'))),
    'clip': _e('clip', -.5, .5),
    'connectionist_temporal_classification': _f(_ctc, (5, 3)),
    'contrastive': _f(lambda m, x, y: F.contrastive(
        x, y, m.t % 2), (5,), (5,)),
    'copy': _e('copy', -1),
    'crf1d': _f(lambda m, x, c: F.crf1d(
        F.reshape(c[0], (3, 3)), [x[:, 0], x[:, 1]], [m.t, m.t]),
        (2, 3), (9,)),
    'decorrelated_batch_normalization': _f(
        lambda m, x: F.decorrelated_batch_normalization(
            x, groups=1), (3, 3, 3)),
    'decov': _f(lambda m, x: F.decov(x)),
    'deformable_convolution_2d_sampler': _f(
        lambda m, x, o, w: F.deformable_convolution_2d_sampler(
            x, o * .3, F.reshape(w[0], (1, 2, 3, 3)), pad=1),
        _IMAGE, (18, 4, 4), (18,)),
    'depth2space': _f(lambda m, x: F.depth2space(x, 2), (4, 2, 2)),
    'depthwise_convolution_2d': _f(
        lambda m, x, w: F.depthwise_convolution_2d(
            x, F.reshape(w[0], (1, 2, 3, 3))), _IMAGE, (18,)),
    'det': _f(lambda m, x: F.det(x), (SAMPLES,)),
    'diagonal': _f(lambda m, x: F.diagonal(x), (3,)),
    'dilated_convolution_2d': _f(
        lambda m, x, w: F.dilated_convolution_2d(
            x, F.reshape(w[0], (1, 2, 2, 2)), dilate=2), _IMAGE, (8,)),
    # It works with as many channels as samples only.
    'discriminative_margin_based_clustering_loss': _f(
        lambda m, x: F.discriminative_margin_based_clustering_loss(
            x, numpy.arange(36).reshape(4, 3, 3).astype('i') % 5,
            .5, 1.5, SAMPLES), (SAMPLES, 3, 3)),
    'einsum': _f(lambda m, x, y: F.einsum('ij,kj->ik', x, y), (5,), (5,)),
    'embed_id': _f(lambda m, x: F.embed_id(m.t, x)),
    'erfcinv': _f(lambda m, x: F.erfcinv(x * .4 + 1)),
    'expand_dims': _e('expand_dims', 1),
    'fft': _f(lambda m, x, y: F.fft((x, y)), (5,), (5,)),
    'fixed_batch_normalization': _f(
        lambda m, x, g: F.fixed_batch_normalization(
            x, g[0], g[1], _ones(5), _ones(5)), (5,), (5,)),
    'fixed_batch_renormalization': _f(
        lambda m, x, g: F.fixed_batch_renormalization(
            x, g[0], g[1], _ones(5), _ones(5)), (5,), (5,)),
    'fixed_decorrelated_batch_normalization': _f(
        lambda m, x: F.fixed_decorrelated_batch_normalization(
            x, _ones(1, 3), numpy.eye(3, dtype='f')[None], groups=1),
        (3, 3, 3)),
    'flip': _e('flip', 1),
    'forget': _f(lambda m, x: F.forget(lambda y: F.tanh(y) * y, x)),
    'gaussian_kl_divergence': _f(
        _both('gaussian_kl_divergence'), (5,), (5,)),
    'gaussian_nll': _f(lambda m, x, y, z: F.gaussian_nll(x, y, z),
                       (5,), (5,), (5,)),
    'get_item': _e('get_item', (slice(None), slice(1, 4))),
    'group_normalization': _f(
        lambda m, x, g: F.group_normalization(x, 2, g[0], g[1]),
        (4, 2), (4,)),
    'hinge': _f(lambda m, x: F.hinge(x, m.t)),
    'huber_loss': _f(lambda m, x, y: F.huber_loss(x, y, .5), (5,), (5,)),
    'ifft': _f(lambda m, x, y: F.ifft((x, y)), (5,), (5,)),
    'im2col': _f(lambda m, x: F.im2col(x, 2), _IMAGE),
    'inv': _f(lambda m, x: F.inv(x * .1 + numpy.eye(4, dtype='f')),
              (SAMPLES,)),
    'layer_normalization': _f(
        lambda m, x, g: F.layer_normalization(x, g[0], g[1]), (5,), (5,)),
    'linear': _f(lambda m, x, w: F.linear(x, w, w[:, 0]), (5,), (5,)),
    'linear_interpolate': _f(
        lambda m, p, x, y: F.linear_interpolate(p, x, y),
        (5,), (5,), (5,)),
    'local_convolution_2d': _f(
        lambda m, x, w: F.local_convolution_2d(
            x, F.reshape(w[0], (1, 3, 3, 2, 2, 2))), _IMAGE, (72,)),
    'local_response_normalization': _f(
        lambda m, x: F.local_response_normalization(x), _IMAGE),
    'lstm': _f(lambda m, c, x: F.lstm(c, x), (2,), (8,)),
    'matmul': _f(lambda m, x, y: F.matmul(x, y, transb=True), (5,), (5,)),
    'max_pooling_2d': _f(lambda m, x: F.max_pooling_2d(
        x, 2, return_indices=True)[0], _IMAGE),
    'maxout': _e('maxout', 5),
    'moveaxis': _f(lambda m, x: F.moveaxis(x, 0, 2), (2, 3)),
    'n_step_bigru': _n_step('n_step_bigru', 3, both=True),
    'n_step_bilstm': _n_step('n_step_bilstm', 4, cell=True, both=True),
    'n_step_birnn': _n_step('n_step_birnn', 1, both=True, kind='tanh'),
    'n_step_gru': _n_step('n_step_gru', 3),
    'n_step_lstm': _n_step('n_step_lstm', 4, cell=True),
    'n_step_rnn': _n_step('n_step_rnn', 1, kind='tanh'),
    'ndtri': _f(lambda m, x: F.ndtri(x * .4 + .5)),
    'negative_sampling': _f(lambda m, x, w: F.negative_sampling(
        x, m.t, w, lambda shape: numpy.full(shape, 3, 'i'), 2),
        (5,), (5,)),
    'pad': _e('pad', ((0, 0), (1, 2)), 'constant'),
    'pad_sequence': _f(lambda m, x: F.pad_sequence(
        [x[0], x[1, :3], x[2, :2]])),
    'permutate': _f(lambda m, x: F.permutate(
        x, numpy.array([2, 0, 1, 4, 3], 'i'), axis=1)),
    'polygamma': _f(lambda m, x: F.polygamma(
        numpy.full(x.shape, 2, 'i'), x + 2)),
    'prelu': _f(lambda m, x, w: F.prelu(x, w[0]), (5,), (5,)),
    'r2_score': _f(lambda m, x: F.r2_score(x[:, 0], m.t.astype('f'))),
    'repeat': _e('repeat', 2, 1),
    'reshape': _e('reshape', (2, 10)),
    'resize_images': _f(lambda m, x: F.resize_images(x, (6, 5)), _IMAGE),
    'roi_pooling_2d': _f(lambda m, x: F.roi_pooling_2d(
        x, _boxes(), 2, 2, 1.), _IMAGE),
    'rollaxis': _f(lambda m, x: F.rollaxis(x, 2), (2, 3)),
    'scale': _f(lambda m, x, y: F.scale(x, y[0]), (5,), (5,)),
    'scatter_add': _f(lambda m, x, y: F.scatter_add(
        x, (slice(None), slice(0, 2)), y), (5,), (2,)),
    'select_item': _f(lambda m, x: F.select_item(x, m.t)),
    'separate': _e('separate', 1),
    'shift': _f(lambda m, x: F.shift(x), (9, 2, 2)),
    'sigmoid_cross_entropy': _f(lambda m, x: F.sigmoid_cross_entropy(
        x, numpy.ones(x.shape, 'i'))),
    'simplified_dropconnect': _f(
        lambda m, x, w: F.simplified_dropconnect(x, w), (5,), (5,)),
    'slstm': _f(lambda m, c, d, x, y: F.slstm(c, d, x, y),
                (2,), (2,), (8,), (8,)),
    'softmax_cross_entropy': _f(
        lambda m, x: F.softmax_cross_entropy(x, m.t)),
    'space2depth': _f(lambda m, x: F.space2depth(x, 2), _IMAGE),
    'sparse_matmul': _f(lambda m, x: F.sparse_matmul(
        chainer.utils.to_coo(numpy.eye(3, 4, dtype='f')), x)),
    'spatial_pyramid_pooling_2d': _f(
        lambda m, x: F.spatial_pyramid_pooling_2d(x, 2, 'max'), _IMAGE),
    'spatial_transformer_grid': _f(
        lambda m, x: F.spatial_transformer_grid(_theta(m, x), (3, 3)),
        (2, 3)),
    'spatial_transformer_sampler': _f(
        _both('spatial_transformer_sampler'), _IMAGE, (2, 3, 3)),
    'split_axis': _e('split_axis', [2, 3], 1),
    'sum_to': _e('sum_to', (1, 5)),
    'swapaxes': _e('swapaxes', 0, 1),
    'swish': _f(lambda m, x, y: F.swish(x, y[0]), (5,), (5,)),
    'tensordot': _f(lambda m, x, y: F.tensordot(x, y, axes=([1], [1])),
                    (5,), (5,)),
    'tile': _e('tile', (1, 2)),
    'transpose_sequence': _f(lambda m, x: F.transpose_sequence(
        [x[0], x[1, :3], x[2, :2]])),
    'tree_lstm': _f(lambda m, c, d, x: F.tree_lstm(c, d, x),
                    (2,), (2,), (10,)),
    'triplet': _f(lambda m, x, y, z: F.triplet(x, y, z),
                  (5,), (5,), (5,)),
    'upsampling_2d': _f(lambda m, x: F.upsampling_2d(
        F.max_pooling_2d(x, 2), F.max_pooling_2d(
            x, 2, return_indices=True)[1], 2), _IMAGE),
    'where': _f(lambda m, x, y: F.where(x.array > 0, x, y), (5,), (5,)),
    'zeta': _f(lambda m, x: F.zeta(
        numpy.full(x.shape, 3, 'f'), x + 2)),
    'zoneout': _f(lambda m, x, y: F.zoneout(x, y), (5,), (5,)),
})


def _started(m, *x):
    """Two steps of a link that keeps its state."""
    m.link.reset_state()
    return m.link(*x), m.link(*[one * .5 for one in x])


def _sequences(m, x):
    return m.link(*[None] * (2 if 'LSTM' in type(m.link).__name__ else 1),
                  _steps(x))


def _tree(m, c, d, h, k, x):
    return m.link(c, d, h, k, x)


def _black_out():
    link = L.BlackOut(5, [5, 3, 2], 2)
    link.W.array[...] = numpy.random.normal(0, 1, link.W.shape)
    return link         # whose weights Chainer leaves for the user to set


def _n_step_link(name):
    return Call(((3, 2),), _sequences,
                lambda: getattr(L, name)(1, 2, 3, 0.))


def _with_state(name):
    return _l(lambda: getattr(L, name)(5, 3), _started)


def _convolving(name, channels, kernel, shape):
    sizes = (channels, 3, kernel)
    return _l(lambda: getattr(L, name)(
        *((3,) if name.endswith('ND') else ()), *sizes), None, shape)


CALLS.update({name: _with_state(name) for name in (
    'GRU', 'LSTM', 'StatefulGRU', 'StatefulMGU', 'StatefulPeepholeLSTM',
    'StatefulZoneoutLSTM')})
CALLS.update({
    f'{kind}{n}': _convolving(f'{kind}{n}', None if (
        f'{kind}{n}' == 'Convolution2D') else 2, kernel, shape)
    for n, shape, kernel in (('1D', _LINE, 3), ('2D', _IMAGE, 3),
                             ('3D', _SPACE, 2), ('ND', _SPACE, 2))
    for kind in ('Convolution', 'Deconvolution')})
CALLS.update({name: _n_step_link(name) for name in (
    'NStepBiGRU', 'NStepBiLSTM', 'NStepBiRNNReLU', 'NStepBiRNNTanh',
    'NStepGRU', 'NStepLSTM', 'NStepRNNReLU', 'NStepRNNTanh')})
CALLS.update({
    'BatchNormalization': _l(lambda: L.BatchNormalization(5)),
    'BatchRenormalization': _l(lambda: L.BatchRenormalization(5)),
    'Bias': _l(lambda: L.Bias(1, (5,))),
    'Bilinear': _l(lambda: L.Bilinear(3, 2, 4), None, (3,), (2,)),
    'BinaryHierarchicalSoftmax': _l(
        lambda: L.BinaryHierarchicalSoftmax(5, ((0, 1), 2)),
        lambda m, x: m.link(x, m.t)),
    'BlackOut': _l(_black_out, lambda m, x: m.link(x, m.t)),
    'CRF1d': _l(lambda: L.CRF1d(3), lambda m, x: (
        m.link([x[:, 0], x[:, 1]], [m.t, m.t]),
        m.link.argmax([x[:, 0], x[:, 1]])), (2, 3)),
    'ChildSumTreeLSTM': _l(lambda: L.ChildSumTreeLSTM(3, 2), _tree,
                           (2,), (2,), (2,), (2,), (3,)),
    'Classifier': _l(lambda: L.Classifier(L.Linear(5, 3)),
                     lambda m, x: m.link(x, m.t)),
    'DecorrelatedBatchNormalization': _l(
        lambda: L.DecorrelatedBatchNormalization(3, groups=1), None,
        (3, 3, 3)),
    'DeformableConvolution2D': _l(
        lambda: L.DeformableConvolution2D(2, 3, 3, pad=1), None, _IMAGE),
    'DepthwiseConvolution2D': _l(
        lambda: L.DepthwiseConvolution2D(2, 2, 3), None, _IMAGE),
    'DilatedConvolution2D': _l(
        lambda: L.DilatedConvolution2D(2, 3, 2, dilate=2), None, _IMAGE),
    'EmbedID': _l(lambda: L.EmbedID(3, 5), lambda m, x: m.link(m.t) * x),
    'GroupNormalization': _l(lambda: L.GroupNormalization(2), None, (4, 2)),
    'Highway': _l(lambda: L.Highway(5)),
    'Inception': _l(lambda: L.Inception(2, 1, 1, 2, 1, 2, 1), None, _IMAGE),
    'InceptionBN': _l(lambda: L.InceptionBN(2, 1, 1, 2, 1, 2, 'max', 1),
                      None, _IMAGE),
    'LayerNormalization': _l(lambda: L.LayerNormalization()),
    'Linear': _l(lambda: L.Linear(None, 3)),
    'LocalConvolution2D': _l(
        lambda: L.LocalConvolution2D(2, 3, (4, 4), 2), None, _IMAGE),
    'MLPConvolution2D': _l(lambda: L.MLPConvolution2D(2, (3, 2), 3), None,
                           _IMAGE),
    'Maxout': _l(lambda: L.Maxout(5, 3, 2)),
    'NaryTreeLSTM': _l(lambda: L.NaryTreeLSTM(3, 2), _tree,
                       (2,), (2,), (2,), (2,), (3,)),
    'NegativeSampling': _l(lambda: L.NegativeSampling(5, [5, 3, 2], 2),
                           lambda m, x: m.link(x, m.t)),
    'PReLU': _l(lambda: L.PReLU((5,))),
    'Parameter': _l(lambda: L.Parameter(numpy.ones((1, 5), 'f')),
                    lambda m, x: x * F.broadcast_to(m.link(), x.shape)),
    'Scale': _l(lambda: L.Scale(1, (5,), True)),
    'SimplifiedDropconnect': _l(lambda: L.SimplifiedDropconnect(5, 3)),
    'StatelessGRU': _l(lambda: L.StatelessGRU(5, 3), None, (3,), (5,)),
    'StatelessLSTM': _l(lambda: L.StatelessLSTM(5, 3), None,
                        (3,), (3,), (5,)),
    'StatelessMGU': _l(lambda: L.StatelessMGU(5, 3), None, (3,), (5,)),
    'Swish': _l(lambda: L.Swish((5,))),
})

LEFT_OUT = {
    'GoogLeNet': 'one of the models', 'ResNet50Layers': 'one of the models',
    'ResNet101Layers': 'one of the models',
    'ResNet152Layers': 'one of the models',
    'VGG16Layers': 'one of the models', 'VGG19Layers': 'one of the models',
    'TheanoFunction': 'Theano does not run with this NumPy'}
