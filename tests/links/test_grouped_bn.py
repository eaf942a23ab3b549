from chainer_fp8pipe.links.grouped_bn import (
    GroupedBatchNormalization,
)

import chainer
import chainer.functions as F
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .groups import Threads, assert_close, parts, reference, results

#: Shapes of inputs (samples first, filled in later), and axes.
CASES = {
    'images': ((0, 3, 4, 2), (0, 2, 3)),
    'vectors': ((0, 5), (0,)),
    'volumes': ((0, 2, 2, 3, 2), (0, 2, 3, 4)),
    'a statistic per pixel': ((0, 2, 3, 2), (0,)),
    'channels last': ((0, 3, 2, 4), (0, 1, 2)),
    'channels apart': ((0, 3, 4, 2), (0, 2)),
    'one channel for all': ((0, 3, 2), (0, 1, 2)),
}


def make(case, ranks=2, **options):
    """Threads, and a link per rank with parameters unlike 1 and 0."""
    (shape, axis), threads = CASES[case], Threads(ranks)
    channels = tuple(length for number, length in enumerate(shape)
                     if number not in axis)
    random = np.random.RandomState(1)
    link = GroupedBatchNormalization(
        channels, group=threads, axis=axis,
        initial_avg_mean=random.randn(*channels) if channels else 0.5,
        **options)
    for parameter in link.params():
        parameter.array[...] = random.randn(*channels)
    link.cleargrads()
    return threads, [link.copy('copy') for _ in range(ranks)]


def train(link, x, gy, **options):
    variable = chainer.Variable(x)
    y = link(variable, **options)
    y.grad = gy.astype(y.dtype)
    y.backward()
    return {'y': y.array, 'gx': variable.grad}


def batch(shape, sizes, seed, spread=3.0, centre=5.0):
    """An input and a gradient, for all ranks together."""
    random = np.random.RandomState(seed)
    shape = (sum(sizes), *shape[1:])
    return ((random.randn(*shape) * spread + centre).astype('f'),
            random.randn(*shape).astype('f'))


def is_one_process(case, sizes, seed=0, spread=3.0, centre=5.0, of=np.float32,
                   tolerance=1e-5, **options):
    """A batch through a group, against the definition of the whole batch."""
    shape, axis = CASES[case]
    threads, links = make(case, len(sizes), **options)
    link, places = links[0], parts(sizes)
    before = link.avg_mean.astype(float)
    x, gy = (item.astype(of) for item in batch(
        shape, sizes, seed, spread, centre))
    found = results(threads, lambda rank: train(
        links[rank], x[places[rank]], gy[places[rank]]))
    scale, shift = (
        getattr(link, name).array.astype(float)
        if options.get(f'use_{name}', True) else np.full_like(before, default)
        for name, default in (('gamma', 1), ('beta', 0)))
    wanted = reference(x, scale, shift, gy, axis)
    for name, largest in (('y', None), ('gx', wanted['terms'])):
        array = np.concatenate([item[name] for item in found])
        assert array.dtype == of
        assert_close(array, wanted[name], max(
            tolerance if of == np.float32 else 0, 4 * np.finfo(of).eps),
            largest=largest)
    for name in 'gamma', 'beta':
        if options.get(f'use_{name}', True):
            grads = [getattr(one, name).grad for one in links]
            assert grads[0].dtype == options.get('dtype', np.float32)
            assert_close(sum(grad.astype(float) for grad in grads),
                         wanted[f'g{name}'], tolerance)
    decay = options.get('decay', .9)
    for one in links:
        assert_close(one.avg_mean, decay * before
                     + (1 - decay) * wanted['mean'], tolerance)
        assert_close(one.avg_var, decay + (1 - decay) * wanted['unbiased'],
                     tolerance)
        assert one.avg_mean.tobytes() == link.avg_mean.tobytes()


@settings(max_examples=60)
@given(st.sampled_from(sorted(CASES)),
       st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any),
       st.sampled_from([0, 0.3, 0.9, 1]), st.booleans(), st.booleans(),
       st.integers(0, 9), st.sampled_from([0, 5, -300]))
def test_a_group_is_one_process_with_the_whole_batch(
        case, sizes, decay, use_gamma, use_beta, seed, centre):
    is_one_process(case, sizes, seed, centre=centre, decay=decay,
                   use_gamma=use_gamma, use_beta=use_beta)


@pytest.mark.parametrize(('dtype', 'parameters', 'tolerance'), [
    (np.float16, np.float32, 1e-5), (np.float16, np.float16, 1e-3),
    (np.float64, np.float64, 1e-12), (np.float32, np.float64, 1e-12)])
def test_statistics_are_float32_or_better(dtype, parameters, tolerance):
    """The first is Chainer's mixed16."""
    is_one_process('images', [40, 30], of=dtype, tolerance=tolerance,
                   dtype=parameters)


def test_nothing_cancels_where_the_mean_is_large():
    """ChainerMN's takes the mean of squares less the square of the mean."""
    is_one_process('images', [16, 16], spread=1, centre=3000, decay=0)


def test_there_is_one_message_forward_and_one_backward():
    threads, links = make('images')
    x, gy = batch((0, 3, 4, 2), [2], 0)
    results(threads, lambda rank: train(links[rank], x, gy))
    assert sorted(threads.sizes) == [6, 6, 7, 7]


def test_recomputation_moves_running_statistics_once():
    def averages(run):
        threads, links = make('vectors')
        x, gy = batch((0, 5), [4, 3], 0)
        places = parts([4, 3])

        def body(rank):
            variable = chainer.Variable(x[places[rank]])
            y = run(links[rank], variable) * 2
            y.grad = gy[places[rank]]
            y.backward()
            return variable.grad
        found = results(threads, body)
        return (found, [link.avg_mean for link in links],
                [link.gamma.grad for link in links])
    found = averages(F.forget)
    wanted = averages(lambda link, x: link(x))
    np.testing.assert_equal(found, wanted)


def test_channels_are_found_in_the_first_batch():
    threads = Threads(2)
    links = [GroupedBatchNormalization(axis=0, group=threads)
             for _ in range(2)]
    x, _ = batch((0, 5), [6], 0)
    results(threads, lambda rank: links[rank](x[rank::2]))
    assert links[0].gamma.shape == (5,)
    assert_close(links[1].avg_mean, .1 * x.mean(0))


@pytest.mark.parametrize('size', [5, None])
@pytest.mark.parametrize('bad', [np.ones((2, 4), 'f'), np.ones((2, 5), 'i'),
                                 None])
def test_an_input_that_does_not_fit_is_an_error_on_all_ranks(size, bad):
    threads = Threads(3)
    links = [GroupedBatchNormalization(size, axis=0, group=threads)
             for _ in range(3)]
    found = threads.run(
        lambda rank: links[rank](bad if rank == 1 else np.ones((2, 5), 'f')))
    assert all(isinstance(item, Exception) for item in found)
    if size == 5:
        assert [link.N for link in links] == [0, 0, 0]
        assert not links[0].avg_mean.any()
    for item in found[0], found[2]:
        assert 'rank 1 of the group' in str(item)


def test_second_derivatives_are_an_error():
    threads, (link,) = make('vectors', 1)
    x, _ = batch((0, 5), [4], 0)

    def body(rank):
        variable = chainer.Variable(x)
        gx, = chainer.grad([F.sum(link(variable) ** 2)], [variable],
                           enable_double_backprop=True)
        F.sum(gx ** 2).backward()
    error, = threads.run(body)
    assert isinstance(error, NotImplementedError)
    assert 'no second derivatives' in str(error)
