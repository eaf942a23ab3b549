"""``create_communicator``: names, options, and what is refused."""
from chainer_fp8pipe import create_communicator
from chainer_fp8pipe.communicators import CodecCommunicator
from chainer_fp8pipe.communicators.options import (
    FAMILIES,
    make_options,
    parse_option,
)

import numpy
import pytest
from chainer.backends import cuda
from mpi4py import MPI

from tests.ranks import on_ranks


@pytest.mark.parametrize(('name', 'given', 'expected'), [
    ('fp8', {}, {   # Algorithm 1's constants
        'period': 100, 'quantile': 0.95, 'samples': 1024, 'epsilon': 1e-5,
        'warmup': 100, 'algorithm': 'direct',
        'error_feedback': True}),
    ('fp8_paper', {}, {
        'quantile': 0.95, 'algorithm': 'mpi_op', 'two_level': 'yes'}),
    # A name's own options may be some that an algorithm ignores.
    ('fp8_paper', {'algorithm': 'torus2d'}, {'shape': (0, 0)}),
    ('fp8', {'warmup': numpy.int64(3)}, {'warmup': 3}),
    ('fp8_paper', {'quantile': numpy.float32(0.5)}, {'quantile': 0.5})])
def test_options_are_the_names_and_those_given(name, given, expected):
    options = make_options(name, given)
    assert {key: getattr(options, key) for key in expected} == expected


def test_numbers_of_numpys_seem_no_others_to_other_ranks():
    plain, other = (
        str(make_options('fp8', {'algorithm': 'torus2d', 'shape': shape,
                                 'frame_bytes': size}))
        for shape, size in (((2, 3), 7),
                            ([2, numpy.int64(3)], numpy.int32(7))))
    assert plain == other


@pytest.mark.parametrize(('name', 'given', 'message'), [
    *((name, {'perod': 3}, "'perod'.*algorithm, shape") for name in FAMILIES),
    ('fp8', {'quantile': .5}, "'fp8' has no option 'quantile'"),
    ('fp8', {'period': 0}, 'at least 1, not 0'),
    ('fp8', {'period': 1.5}, 'type int, not 1.5'),
    ('fp8', {'period': True}, 'type int'),
    ('fp8_paper', {'quantile': 1.5}, 'between 0 and 1'),
    ('fp8_paper', {'quantile': float('nan')}, 'between 0 and 1'),
    ('fp8', {'epsilon': 0}, 'between 1e-30'),
    ('fp8', {'epsilon': '3'}, 'type float'),
    ('fp8', {'error_feedback': 1.0}, 'True, False'),
    ('fp8', {'two_level': True}, "'auto', 'yes', 'no'"),
    *((name, {'algorithm': 'mpi_op'}, "algorithm='mpi_op' makes sums in the "
       'format of the wire, which blocks.*pass another algorithm')
      for name in ('int4',)),
    ('fp8', {'shape': (2, 2)},
     r"shape=\(2, 2\) does not go with algorithm='direct'; pass "
     r"algorithm='torus2d', or no shape"),
    ('fp8', {'algorithm': 'torus2d', 'two_level': 'no'},
     "two_level='no' does not go with"),
    ('float32', {'algorithm': 'ring', 'aggregators': 1}, 'aggregators=1 does'),
    ('fp8', {'algorithm': 'mpi_op', 'aggregators': 1}, 'aggregators=1 does'),
    ('fp8_paper', {'frame_bytes': 100}, 'or no frame_bytes')])
def test_what_is_not_allowed_is_an_error_that_lists_what_is(name, given,
                                                            message):
    with pytest.raises(ValueError, match=message):
        make_options(name, given)


@pytest.mark.parametrize(('option', 'text', 'expected'), [
    ('period', '7', 7), ('epsilon', '0.5', 0.5),
    ('error_feedback', 'False', False), ('two_level', 'no', 'no'),
    ('overlap', 'true', True),
    ('period', 'x', ValueError('period must be of type int')),
    ('error_feedback', 'maybe', ValueError('true or false')),
    ('nonsense', '1', ValueError('its options are'))])
def test_options_are_read_from_text(option, text, expected):
    if isinstance(expected, ValueError):
        with pytest.raises(ValueError, match=str(expected)):
            parse_option('fp8', option, text)
    else:
        parsed = parse_option('fp8', option, text)
        assert (parsed, type(parsed)) == (expected, type(expected))


@on_ranks(2)
def test_names_are_this_packages_or_chainermns(comm):
    made = create_communicator('naive', comm)
    assert (type(made).__name__, made.size) == ('NaiveCommunicator', 2)
    made = create_communicator()
    assert isinstance(made, CodecCommunicator)
    assert (made.name, made.size) == ('fp8', comm.size)


#: Of all ranks, or by rank; what all of them raise.
@pytest.mark.parametrize(('name', 'given', 'error', 'message'), [
    ('fp9', {}, ValueError, "'fp9'.*int4, fp8, fp8_paper, bfloat16, float16, "
     'float32, naive'),
    (['fp8'], {}, ValueError, r"\['fp8'\]; choose from"),
    ('naive', {'warmup': 3}, ValueError, "'naive' has no option 'warmup'"),
    *(pytest.param(
        name, {}, RuntimeError, f"{cause}.*Take 'fp8' or.*'naive'",
        marks=pytest.mark.skipif(cuda.available, reason='a GPU is there'))
      for name, cause in (('pure_nccl', 'NCCL'), ('flat', 'Cupy'))),
    ('fp8', {'mpi_comm': 'world'}, TypeError, 'mpi_comm'),
    ('fp8', {'mpi_comm': MPI.COMM_NULL}, TypeError, 'mpi_comm'),
    ('fp8', [{}, {'period': 7}, {}], ValueError,
     'option period .* is 100 on rank 0 but 7 on rank 1'),
    ('float32', [{}, {'algorithm': 'aggregator'}, {}], ValueError,
     'direct.*on rank 0 but.*aggregator.* on rank 1'),
    ('fp8', {'ranks_per_node': 2}, ValueError,
     'ranks_per_node=2 does not divide')])
@on_ranks(3)
def test_all_ranks_refuse(comm, name, given, error, message):
    given = given if isinstance(given, dict) else given[comm.rank]
    with pytest.raises(error, match=message):
        create_communicator(name, **{'mpi_comm': comm, **given})
