from chainer_fp8pipe.links import Divisible, Dropout
from chainer_fp8pipe.pipeline.randomness import Place, at

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

PLACE = Place(seed=1, iteration=2, layer=3, first_sample=0)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def dropped(link, x, place=PLACE):
    """What the link makes of x at a place."""
    with at(Place(*place)):
        return link(x).array


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6),
       st.lists(st.integers(1, 5), max_size=2), st.integers(0, 2 ** 40))
def test_the_mask_of_a_sample_does_not_depend_on_how_the_batch_was_cut(
        micro_batches, shape, first):
    link = Dropout(0.5)
    x = ones(sum(micro_batches), *shape)
    whole = dropped(link, x, PLACE._replace(first_sample=first))
    parts, done = [], 0
    for count in micro_batches:
        place = PLACE._replace(first_sample=first + done)
        parts.append(dropped(link, x[done:done + count], place))
        done += count
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize('change', [
    {'seed': 2}, {'iteration': 3}, {'layer': 4}, {'first_sample': 1}])
def test_the_mask_depends_on_all_that_it_should(change):
    link, x = Dropout(0.5), ones(4, 40)
    before = dropped(link, x)
    np.testing.assert_array_equal(dropped(link, x), before)
    assert (dropped(link, x, PLACE._replace(**change)) != before).any()


def test_masks_of_samples_and_of_links_in_one_layer_are_independent():
    class Twice(chainer.Chain):
        def __init__(self):
            super().__init__(one=Dropout(0.5), two=Dropout(0.5))

        def forward(self, x):
            return self.one(x), self.two(x)

    with at(PLACE):
        one, two = Twice()(ones(300, 300))
    masks = [one.array > 0, two.array > 0]
    for mask in masks:
        assert len({row.tobytes() for row in mask}) == 300
        assert len({row.tobytes() for row in mask.T}) == 300
    # Of 90,000 pairs a half agree, give or take 5 standard deviations.
    assert abs((masks[0] == masks[1]).sum() - 45000) < 5 * 150
    assert abs((masks[0][1:] == masks[0][:-1]).sum() - 44850) < 5 * 150


@pytest.mark.parametrize('ratio', [0.1, 0.5, 0.9])
@pytest.mark.parametrize('dtype', [np.float16, np.float32, np.float64])
def test_a_share_is_dropped_and_the_rest_scaled_as_chainer_does(
        ratio, dtype):
    y = dropped(Dropout(ratio), ones(1000, 100, dtype=dtype))
    chainers = F.dropout(ones(1000, 100, dtype=dtype), ratio).array
    assert y.dtype == dtype
    assert set(np.unique(y)) == set(np.unique(chainers))
    # 5 standard deviations of a share of 100,000
    error = 5 * np.sqrt(ratio * (1 - ratio) / 1e5)
    assert abs((y == 0).mean() - ratio) < error


def test_gradients_go_where_values_went():
    x = chainer.Variable(np.random.rand(6, 7).astype(np.float32))
    with at(PLACE):
        y = Dropout(0.3)(x)
    y.grad = ones(6, 7)
    y.backward()
    np.testing.assert_allclose(y.array, x.array * x.grad, rtol=1e-6)
    assert (x.grad == 0).any()


def test_nothing_is_dropped_outside_of_training():
    x = ones(4, 5)
    with chainer.using_config('train', False):
        np.testing.assert_array_equal(dropped(Dropout(0.9), x), x)
        np.testing.assert_array_equal(Dropout(0.9)(x).array, x)
    np.testing.assert_array_equal(dropped(Dropout(0), x), x)


@pytest.mark.parametrize('ratio', [-0.1, 1, 1.5, float('nan')])
def test_a_ratio_out_of_range_is_an_error(ratio):
    with pytest.raises(ValueError, match=r'ratio must be in \[0, 1\)'):
        Dropout(ratio)


def test_dropout_outside_of_a_pipeline_is_chainers():
    x = ones(4, 5)
    np.random.seed(3)
    expected = F.dropout(x, 0.4).array
    np.random.seed(3)
    np.testing.assert_array_equal(Dropout(0.4)(x).array, expected)


def test_the_users_generator_is_left_alone_at_a_place():
    with at(PLACE):
        expected = np.random.rand()
    with at(PLACE):
        Dropout(0.5)(ones(4, 5))
        assert np.random.rand() == expected


@pytest.mark.parametrize('shape', [(0, 3), (3, 0), (5,), (2, 3, 4, 5)])
def test_any_shape_of_samples_is_taken(shape):
    assert dropped(Dropout(0.5), ones(*shape)).shape == shape
    with pytest.raises(ValueError, match='array of samples'):
        dropped(Dropout(0.5), np.float32(3).reshape(()))


def test_dropout_is_a_link_without_parameters():
    model = Divisible(L.Linear(3, 3), Dropout(0.25))
    assert str(model[1]) == 'Dropout(ratio=0.25)'
    assert list(model[1].params()) == []
    assert model.copy('copy')[1].ratio == 0.25
