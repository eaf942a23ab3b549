"""The photographs that the benchmark, tests and example read."""
import pathlib
import sys

import numpy
import pytest
from PIL import Image

# Benchmarks import each other from their folder.
sys.path.append(str(pathlib.Path(__file__).parents[2] / 'benchmarks'))
import input_pipeline
import photographs


def test_every_class_gets_its_share(tmp_path):
    paths = photographs.build(tmp_path, images=25, classes=10, scale=.2)
    assert sorted(paths) == sorted(tmp_path.glob('*/*.JPEG'))
    counts = {}
    for path in paths:
        counts[path.parent.name] = counts.get(path.parent.name, 0) + 1
    assert len(counts) == 10
    assert {*counts.values()} == {2, 3}


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    found = [[path.read_bytes() for path in photographs.build(
        tmp_path / name, images=6, seed=seed, scale=.2)]
        for name, seed in (('a', 1), ('b', 1), ('c', 2))]
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_sizes_are_about_those_of_imagenet():
    rng = numpy.random.default_rng(0)
    sizes = numpy.array([photographs.draw_size(rng) for _ in range(5000)])
    assert numpy.abs(sizes.mean(0) - (480, 420)).max() < 25
    assert sizes.min() < 150
    assert sizes.max() > 1500
    assert (sizes[:, 0] > sizes[:, 1]).mean() > .6


def test_large_images_continue_the_photograph_mirrored():
    pixels = numpy.arange(12, dtype=numpy.uint8).reshape(2, 2, 3)
    cut = photographs._cut(pixels, 4, 2, numpy.random.default_rng(0))
    numpy.testing.assert_array_equal(cut[:, 2:], pixels[:, ::-1])


def test_classes_differ_in_colour(tmp_path):
    means = {}
    for path in photographs.build(tmp_path, images=40, scale=.2):
        pixels = numpy.asarray(Image.open(path), 'f4')
        means.setdefault(path.parent.name, []).append(
            pixels.mean((0, 1)) / pixels.mean())
    plain, red = (numpy.mean(means[name], 0) for name in
                  ('flower_0', 'flower_1'))
    assert red[0] > 1.2 * plain[0]


def test_more_classes_than_there_are_is_an_error(tmp_path):
    with pytest.raises(ValueError, match='1 to 10 classes'):
        photographs.build(tmp_path, classes=11)


def test_each_part_is_removed_and_used_alone():
    found = input_pipeline.choices()
    assert {*found['everything']} - {*found['without fused']} == {'fused'}
    assert found['only cache'] == ('cache',)
    assert len(found) == 10
