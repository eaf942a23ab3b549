from types import SimpleNamespace
from unittest import mock

from chainer_fp8pipe.training.run_reports import watching
from chainer_fp8pipe.training.run_reports.watching import CurveMeans

import numpy


def add(means, iteration, **values):
    means.add(SimpleNamespace(
        updater=SimpleNamespace(iteration=iteration,
                                epoch_detail=iteration / 4),
        observation=values, elapsed_time=0.5 * iteration))


def test_each_update_is_a_point_at_first():
    means = CurveMeans(3, 10)
    add(means, 11, loss=numpy.float32(2.0), note='text')
    add(means, 12, loss=(4.0, 3), accuracy=0.5)
    one, other = means.take()
    assert one == (3, 11, 2.75, 5.5, {'loss': 2.0})
    assert other == (3, 12, 3.0, 6.0, {'loss': 4.0, 'accuracy': 0.5})
    assert means.take() == []


def test_many_points_are_means_of_several_updates():
    means = CurveMeans(0, 0)
    with mock.patch.object(watching, '_MANY', 4):
        for iteration in range(1, 29):
            add(means, iteration, loss=float(iteration))
    assert [(point.iteration, point.values['loss'])
            for point in means.take()] == [
        (1, 1), (2, 2), (3, 3), (4, 4), (6, 5.5), (8, 7.5), (10, 9.5),
        (12, 11.5), (16, 14.5), (20, 18.5), (24, 22.5), (28, 26.5)]


def test_updates_that_report_nothing_are_no_points():
    means = CurveMeans(0, 0)
    add(means, 1)
    assert means.take() == []
