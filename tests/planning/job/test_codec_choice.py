"""Figures of codecs become what simulations are given."""
from chainer_fp8pipe.planning.allreduce.codec_costs import CodecCosts
from chainer_fp8pipe.planning.job.codec_choice import (
    codec_costs,
    form_of_sums,
    seconds_beside,
)
from chainer_fp8pipe.planning.job.job_profile import CodecFigures, Figure

import pytest

FIGURES = CodecFigures({name: Figure(rate) for rate, name in enumerate((
    'encode', 'decode', 'accumulate', 'add', 'add_partial', 'pack', 'mean'),
    1)})
BESIDE = {'encode': 1, 'decode': 2, 'by_frame': True}
APART = {'add': 3, 'add_own': 3, 'add_partial': 5, 'pack': 6, 'mean': 7}
IN_WIRE = {'add': 4, 'add_partial': 4}


@pytest.mark.parametrize(('name', 'form', 'wanted'), [
    ('fp8', 'auto', CodecCosts(1, 2, **APART, **BESIDE)),
    ('fp8', 'float16', CodecCosts(1, 2, **APART, **BESIDE)),
    ('fp8', 'float32', CodecCosts(1, 4, **APART, **BESIDE)),
    ('fp8', 'wire', CodecCosts(1, 1, **IN_WIRE, **BESIDE)),
    ('float16', 'auto', CodecCosts(2, 4, **APART, **BESIDE)),
    ('float16', 'float16', CodecCosts(2, 2, **APART, **BESIDE)),
    ('float16', 'wire', CodecCosts(2, 2, **IN_WIRE, **BESIDE)),
    ('float32', 'auto', CodecCosts(4, 4, **IN_WIRE, **BESIDE)),
    ('float32', 'float16', CodecCosts(4, 4, **IN_WIRE, **BESIDE))])
def test_bytes_and_rates_are_those_of_the_form_of_sums(name, form, wanted):
    assert codec_costs(FIGURES, name, 'ring', form) == wanted


def test_mpi_is_given_wires_that_are_encoded_and_sums_in_them():
    assert codec_costs(FIGURES, 'fp8', 'mpi_op') == CodecCosts(
        1, 1, **IN_WIRE, **{**BESIDE, 'by_frame': False})


def test_sums_of_fp8_travel_in_float16_by_default():
    assert [form_of_sums(name) for name in ('fp8', 'float16', 'float32')] == [
        'float16', 'float32', 'wire']


def test_tensors_and_buckets_add_to_what_is_not_simulated():
    figures = CodecFigures({}, Figure(10.0), Figure(2.0), Figure(3.0))
    assert seconds_beside(figures, 1) == 10
    assert seconds_beside(figures, 5, 3, known=4.0) == 6 + 4 * 2 + 2 * 3
    assert seconds_beside(figures, 1, known=11.0) == 0
