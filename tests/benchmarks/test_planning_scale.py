"""The map of planning_scale: who wins, by how much, and what it is made of."""
import importlib
import pathlib
import re
import sys

from chainer_fp8pipe.allreduce.plan import direct
from chainer_fp8pipe.pipeline.schedules import make_schedule
from chainer_fp8pipe.planning.allreduce.codec_costs import (
    CodecCosts,
    StepCosts,
)
from chainer_fp8pipe.planning.allreduce.demand import direct_demand
from chainer_fp8pipe.planning.allreduce.prediction import estimate
from chainer_fp8pipe.planning.allreduce.simulation import add_exchange
from chainer_fp8pipe.planning.cluster import Cluster
from chainer_fp8pipe.planning.engine import Engine
from chainer_fp8pipe.planning.schedules.simulator import (
    Costs,
    Link,
    add_pipeline,
    simulate,
)

import pytest

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope='module', autouse=True)
def scale():
    """The benchmark's modules, which import each other."""
    folder = str(_ROOT / 'benchmarks')
    sys.path.append(folder)
    names = 'planning_scale', 'scale_map', 'scale_models', 'scale_papers'
    found = {name: importlib.import_module(name)
             for name in (*names, 'scale_steps', 'scale_check')}
    yield type('Modules', (), found)
    sys.path.remove(folder)


@pytest.fixture(scope='module')
def steps(scale):
    return scale.scale_steps.Steps(_setting(scale))


def _setting(scale, **changes):
    kernels = {'copy (NumPy)': 4e9, 'accumulate': 4e9, 'encode': 5e9,
               'add': 2e9}
    return scale.scale_steps.Setting(
        scale.scale_steps.Speeds(1e13, 9e11, 1.2e10, kernels), **changes)


def _model(scale, name):
    return next(model for model in scale.scale_models.MODELS
                if name in model.name)


# --- who wins ----------------------------------------------------------------

def _kind(scale, codec='float32', algorithm='direct', stages=1):
    return scale.scale_steps.Kind(codec, algorithm, stages)


def test_the_simplest_of_equally_fast_kinds_wins(scale):
    plain, short = _kind(scale), _kind(scale, 'fp8')
    winner = scale.scale_map.winner
    assert winner({plain: 1.01, short: 1.0}, 0.02) == plain
    assert winner({plain: 1.03, short: 1.0}, 0.02) == short


def test_gains_are_over_the_best_that_differs(scale):
    found = {_kind(scale): 6.0, _kind(scale, algorithm='ring'): 5.0,
             _kind(scale, 'fp8'): 2.0, _kind(scale, 'fp8', 'ring'): 3.0,
             _kind(scale, 'fp8', stages=2): 8.0}
    assert scale.scale_map.gains(found, _kind(scale, 'fp8')) == {
        'codec': 2.5, 'algorithm': 1.5, 'cut': 4.0}


def test_a_kind_without_another_has_no_gain(scale):
    only = _kind(scale, 'fp8', stages=2)
    assert scale.scale_map.gains({only: 1.0}, only) == {
        'codec': None, 'algorithm': None, 'cut': None}


def test_the_ring_is_that_of_pipelines_where_there_is_no_room(scale):
    ring, pipelines = (_kind(scale, algorithm='ring', stages=stages)
                       for stages in (1, 4))
    seconds = scale.scale_map.ring_seconds
    assert seconds({ring: 3.0, pipelines: 2.0}) == 3.0
    assert seconds({pipelines: 2.0, _kind(scale): 1.0}) == 2.0


# --- steps -------------------------------------------------------------------

def test_a_slow_network_wants_fp8_and_a_fast_one_whatever(scale, steps):
    model = _model(scale, 'ResNet-50')
    times = {(rate, codec): steps.seconds(model, 64, rate,
                                          _kind(scale, codec))
             for rate in (1.25e7, 1.25e11) for codec in ('float32', 'fp8')}
    assert times[1.25e7, 'float32'] / times[1.25e7, 'fp8'] > 3.5
    assert times[1.25e11, 'float32'] < times[1.25e11, 'fp8']


def test_a_model_without_room_has_no_replicas_but_stages(scale, steps):
    model = _model(scale, 'BERT-Tall')
    assert not steps.fits(model)
    assert steps.seconds(model, 16, 1e9, _kind(scale)) is None
    assert steps.with_switch(model, 16, 1e9, 'fp8') is None
    assert steps.seconds(model, 16, 1e9, _kind(scale, stages=4)) > 0


def test_aggregators_out_of_the_ranks_are_no_faster_than_direct(scale, steps):
    """They halve the time of an exchange, and the ranks that compute."""
    model = _model(scale, 'ResNet-50')
    for rate in (1e8, 1e10):
        served, plain = (steps.seconds(model, 64, rate,
                                       _kind(scale, 'float32', algorithm))
                         for algorithm in ('aggregator', 'direct'))
        assert served > 0.99 * plain


def test_a_switch_that_sums_halves_a_long_exchange(scale, steps):
    model = _model(scale, 'ResNet-50')
    compute = steps.compute(model)
    plain = steps.seconds(model, 1024, 1e7, _kind(scale)) - compute
    switch = steps.with_switch(model, 1024, 1e7, 'float32') - compute
    assert plain / switch == pytest.approx(2, rel=0.02)


def test_what_is_no_kind_of_these_ranks_is_not_tried(scale, steps):
    kinds = steps.kinds(_model(scale, 'CaffeNet'), 16)
    assert all(kind.stages in (1, 2, 4, 8) for kind in kinds)    # 8 layers
    assert {kind.codec for kind in kinds} == {'float32', 'float16', 'fp8'}
    assert not any(kind.algorithm == 'aggregator' and kind.stages > 1
                   for kind in kinds)


def test_an_exchange_beside_backward_hides_behind_it(scale):
    beside = scale.scale_steps.beside_backward
    layer = scale.scale_models.Layer
    model = scale.scale_models.ScaleModel('two', (
        layer(100, 1.0, 0, 0), layer(300, 1.0, 0, 0)), 1)

    def exchange(elements):
        return elements / 300

    # Forward takes 1, each backward 1; the last layer's 300 are ready at 2.
    assert beside(model, 3.0, exchange, 4e9) == pytest.approx(3 + 4 / 3)
    assert beside(model, 3.0, exchange, 1200) == pytest.approx(3 + 1 / 3)
    assert beside(model, 30.0, exchange, 400) == pytest.approx(30 + 1 / 3)


def test_pipelines_and_then_exchanges_take_their_sum_at_most():
    """Two stages and four replicas in one engine, links and ports shared."""
    cluster = Cluster(range(8), 1.25e9, 1e-5)
    codec, elements, size = CodecCosts(1, 1), 5_000_000, 250_000
    costs = [Costs(0.002, 0.002, 0.002)] * 2
    schedule = make_schedule('1f1b', 2, 4)
    framing = {'frame_bytes': 1 << 18, 'frames_in_flight': 8}
    engine = Engine(cluster)
    columns = [add_pipeline(engine, schedule, costs, [size],
                            ranks=(replica, 4 + replica))
               for replica in range(4)]
    for stage in (0, 1):
        add_exchange(engine, [direct(4)], StepCosts(cluster, codec), elements,
                     ranks=range(4 * stage, 4 * stage + 4),
                     after=[column[stage] for column in columns], **framing)
    engine.run()
    pipeline = simulate(schedule, costs, Link(1e-5, 1.25e9, [size])).step_time
    exchange = estimate([direct_demand(4)], Cluster((), 1.25e9, 1e-5), codec,
                        elements, **framing).seconds
    assert 0.95 < engine.seconds / (pipeline + exchange) < 1.001


# --- what it is made of ------------------------------------------------------

@pytest.mark.parametrize(('name', 'elements', 'operations'), [
    ('ResNet-56', 0.86e6, 0.75e9), ('ResNet-50', 25.6e6, 24.6e9),
    ('CaffeNet', 61.0e6, 4.35e9), ('BERT-Large', 335e6, 240e9),
    ('BERT-Tall', 1850e6, 1280e9)])
def test_models_have_their_parameters_and_operations(scale, name, elements,
                                                     operations):
    model = _model(scale, name)
    assert model.elements == pytest.approx(elements, rel=0.02)
    assert model.operations == pytest.approx(operations, rel=0.06)


def test_estimates_are_near_simulations_of_a_sample(scale, steps):
    found = scale.scale_check.cases(steps.codecs, 12, seed=1)
    rows = scale.scale_check.summary(found)
    name, count, median, *_ = rows[-1]
    assert (name, count) == ('all', 12)
    assert median == pytest.approx(1, abs=0.05)
    assert sum(row[1] for row in rows[:-1]) == 12


def test_a_zero_is_found_between_two_numbers(scale):
    bisected = scale.scale_papers.bisected
    assert bisected(lambda x: x - 70, 1, 1e4) == pytest.approx(70, rel=2e-3)
    assert bisected(lambda x: 70 - x, 1, 1e4) == pytest.approx(70, rel=2e-3)


def test_a_rate_that_is_fitted_to_a_number_gives_that_number(scale):
    papers = scale.scale_papers
    wires = papers._sums_in_wire({'copy (NumPy)': 3.9e9, 'add': 2.4e9})
    rate = papers._rate_of_mpi(wires)
    times = [papers._kfc_allreduce(16, wires[name], rate)
             for name in ('float32', 'fp8')]
    assert times[0] / times[1] == pytest.approx(3.21, rel=0.01)


def test_every_row_of_the_papers_says_why(scale, capsys):
    rows = scale.planning_scale.print_papers(
        scale.planning_scale.kernel_rates(scale.planning_scale.KERNELS))
    assert len({row['paper'] for row in rows}) == 6
    for row in rows:
        assert row['why']
        assert row['predicted'] > 0
        assert (row['ratio'] is None) == (row['published'] is None)
    printed = capsys.readouterr().out.splitlines()
    page = (_ROOT / 'docs/benchmarks/planning_scale.txt').read_text()
    assert set(printed) <= set(page.splitlines())


def test_the_figure_has_a_panel_for_each_model(scale, steps, tmp_path):
    plot = importlib.import_module('scale_plot').plot
    cells = [scale.scale_map.cell(steps, model, 4, 1, 0.02)
             for model in scale.scale_models.MODELS]
    path = tmp_path / 'map.png'
    plot(cells, steps, [1], [4], scale.planning_scale.LETTERS, path)
    assert path.read_bytes().startswith(b'\x89PNG')


def test_the_page_cites_what_the_script_prints():
    text = (_ROOT / 'docs/benchmarks/planning_scale.txt').read_text()
    page = (_ROOT / 'docs/planning_scale.rst').read_text()
    blocks = re.findall(r'\.\. code-block:: text\n\n((?:(?:   .*)?\n)+)', page)
    assert blocks
    for block in blocks:
        for line in block.strip('\n').splitlines():
            assert line[3:] in text
