from chainer_fp8pipe.communicators.options import (
    FAMILIES,
    make_options,
    parse_option,
)

import numpy
import pytest


def test_fp8s_defaults_are_algorithm_1s_constants():
    options = make_options('fp8', {})
    assert (options.period, options.quantile, options.samples,
            options.epsilon, options.warmup) == (100, 0.95, 1024, 1e-5, 100)
    assert (options.rounding, options.algorithm, options.error_feedback) == (
        'nearest', 'direct', True)


def test_fp8_papers_defaults_are_the_papers():
    options = make_options('fp8_paper', {})
    assert (options.rounding, options.algorithm, options.two_level,
            options.error_feedback, options.headroom) == (
        'truncate', 'mpi_op', 'yes', False, 1.0)


@pytest.mark.parametrize('name', FAMILIES)
def test_an_unknown_option_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="'perod'.*algorithm, shape"):
        make_options(name, {'perod': 3})


@pytest.mark.parametrize(('option', 'value', 'message'), [
    ('rounding', 'up', "'nearest', 'truncate', 'stochastic', not 'up'"),
    ('period', 0, 'at least 1, not 0'),
    ('period', 1.5, 'type int, not 1.5'),
    ('period', True, 'type int'),
    ('quantile', 1.5, 'between 0 and 1'),
    ('quantile', float('nan'), 'between 0 and 1'),
    ('epsilon', 0, 'between 1e-30'),
    ('headroom', '3', 'type float'),
    ('error_feedback', 'no', 'True, False'),
    ('error_feedback', 1.0, 'True, False'),
    ('two_level', True, "'auto', 'yes', 'no'"),
])
def test_a_value_that_is_not_allowed_lists_what_is(option, value, message):
    with pytest.raises(ValueError, match=message):
        make_options('fp8', {option: value})


@pytest.mark.parametrize('name', ['int4', 'int5'])
@pytest.mark.parametrize('given', [
    {'algorithm': 'mpi_op'}, {'partial_sums': 'wire'}])
def test_blocks_are_not_summed_in_the_format_of_the_wire(name, given):
    option, = given
    with pytest.raises(ValueError, match=f'{option}=.* makes sums in the '
                       f'format of the wire, which blocks.*another {option}'):
        make_options(name, given)


def test_int4s_values_are_one_of_two():
    assert make_options('int4', {}).values == 'int4'
    assert make_options('int4', {'values': 'e2m1'}).values == 'e2m1'
    with pytest.raises(ValueError, match="'int4', 'e2m1', not 'fp9'"):
        make_options('int4', {'values': 'fp9'})
    with pytest.raises(ValueError, match="'int5' has no option 'values'"):
        make_options('int5', {'values': 'int4'})


def test_numpys_numbers_are_numbers():
    assert make_options('fp8', {'warmup': numpy.int64(3)}).warmup == 3
    assert make_options('fp8', {'quantile': numpy.float32(0.5)})
    plain, other = (
        str(make_options('torus2d', {'shape': shape, 'frame_bytes': size}))
        for shape, size in (((2, 3), 7),
                            ([2, numpy.int64(3)], numpy.int32(7))))
    assert plain == other       # or ranks would seem to differ


@pytest.mark.parametrize(('option', 'text', 'value'), [
    ('period', '7', 7), ('quantile', '0.5', 0.5),
    ('error_feedback', 'False', False), ('rounding', 'truncate', 'truncate')])
def test_options_are_read_from_text(option, text, value):
    parsed = parse_option('fp8', option, text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(('option', 'text', 'message'), [
    ('period', 'x', 'period must be of type int'),
    ('error_feedback', 'maybe', 'true or false'),
    ('nonsense', '1', 'its options are')])
def test_text_that_is_no_value_is_an_error(option, text, message):
    with pytest.raises(ValueError, match=message):
        parse_option('fp8', option, text)


@pytest.mark.parametrize(('name', 'given', 'message'), [
    ('fp8', {'shape': (2, 2)},
     r"shape=\(2, 2\) does not go with algorithm='direct'; pass "
     r"algorithm='torus2d', or no shape"),
    ('torus2d', {'two_level': 'no'}, "two_level='no' does not go with"),
    ('float32', {'algorithm': 'ring', 'aggregators': 1}, 'aggregators=1 does'),
    ('fp8', {'algorithm': 'mpi_op', 'aggregators': 1}, 'aggregators=1 does'),
    ('fp8_paper', {'partial_sums': 'wire'}, "algorithm='mpi_op'; pass"),
    ('fp8_paper', {'frame_bytes': 100}, 'or no frame_bytes'),
    ('torus2d', {'algorithm': 'ring'},
     "'torus2d' is float32 with algorithm='torus2d', not 'ring'")])
def test_an_option_that_the_algorithm_does_not_use_is_an_error(name, given,
                                                               message):
    with pytest.raises(ValueError, match=message):
        make_options(name, given)


def test_a_name_may_have_options_of_its_own_that_an_algorithm_ignores():
    assert make_options('fp8_paper', {'algorithm': 'torus2d'}).shape == (0, 0)
