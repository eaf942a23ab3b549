"""Rates of codecs: what is measured, and how rates come of seconds."""
import math
import pickle
import types

from chainer_fp8pipe.allreduce.plan import Opcode, direct, ring
from chainer_fp8pipe.allreduce.rank_plan import program
from chainer_fp8pipe.planner.codec import codec_rates
from chainer_fp8pipe.planner.codec.codec_rates import (
    _Bench,
    _rate,
    _to_itself,
    measure_codecs,
    operation_rates,
)
from chainer_fp8pipe.planning.job.job_profile import Figure

import pytest

from tests.ranks import on_ranks

OPERATIONS = {'encode', 'decode', 'accumulate', 'add', 'add_partial', 'pack',
              'mean'}
#: Seconds of an element.
TRUE = {'encode': 1.1, 'decode': 0.7, 'accumulate': 0.23, 'add': 0.31,
        'add_partial': 0.41, 'pack': 0.53, 'mean': 1.3}


@on_ranks(1, 2)
def test_all_ranks_have_the_same_figures_of_every_operation(comm):
    found = measure_codecs(comm, ('fp8', 'float16', 'float32', 'int4'), 0.1)
    assert len(set(comm.allgather(pickle.dumps(found)))) == 1
    assert list(found) == ['fp8', 'float16', 'float32', 'int4']
    for name, figures in found.items():
        assert set(figures.rates) == OPERATIONS
        finite = {operation for operation, rate in figures.rates.items()
                  if rate.value < math.inf}
        assert finite <= OPERATIONS
        assert {'encode', 'decode'} <= finite
        assert ('add' in finite) is (name != 'int4')    # in the wire
        assert min(rate.value for rate in figures.rates.values()) > 0
        assert figures.update.value > 0
        if name == 'float32':       # is summed in the wire
            assert finite == {'encode', 'decode', 'add'}


@on_ranks(2)
def test_an_unknown_name_is_an_error_on_all_ranks(comm):
    with pytest.raises(ValueError, match="'naive'; choose from: fp8, flo"):
        measure_codecs(comm, ('fp8', 'naive'))


@on_ranks(2)
def test_a_failure_of_one_rank_is_raised_on_all(comm):
    def broken():
        raise MemoryError('no room')
    codecs = codec_rates._CODECS
    whole = codecs['float32']
    if comm.rank == 1:
        codecs['float32'] = broken
    try:
        with pytest.raises(RuntimeError, match='rank 1: MemoryError: no roo'):
            operation_rates(comm, 'float32', 0.0)
    finally:
        codecs['float32'] = whole


@pytest.mark.parametrize('plan', [direct, ring])
def test_a_rank_that_talks_to_itself_does_what_it_does_with_others(plan):
    alone, among = program(_to_itself(plan(4)), 0), program(plan(4), 0)
    assert [step._replace(action=step.action._replace(peer=0))
            for step in among.steps if step.action.kind is not Opcode.ENCODE
            ] == [step for step in alone.steps
                  if step.action.kind is not Opcode.ENCODE]
    assert alone.held == among.held
    assert [step for step in alone.steps
            if step.action.kind is Opcode.ENCODE] == [
        step for step in among.steps if step.action.kind is Opcode.ENCODE]


def test_seconds_of_operations_are_found_from_those_of_whole_exchanges():
    """The exchange's seconds are added up step by step here."""
    def run(executor, encodes=True):
        form, plan = executor
        writing, reading = ((TRUE['encode'], TRUE['decode']) if encodes
                            else (0.0, 0.0))
        for (kind, *_), summed, fresh in program(plan(4), 0).steps:
            if kind is Opcode.SEND_PARTIAL and summed:
                writing += TRUE['pack'] / 4
            elif kind is Opcode.ENCODE and form != 'wire':
                writing += TRUE['mean'] / 4
            elif kind is Opcode.RECEIVE_PARTIAL and form == 'wire':
                reading += TRUE['add'] / 4
            elif kind is Opcode.RECEIVE_PARTIAL:
                reading += fresh * TRUE['accumulate'] / 4 + TRUE[
                    'add_partial' if summed else 'accumulate'] / 4
        return writing, reading

    apart = types.SimpleNamespace(
        _direct=('float16', direct), _ring=('float16', ring),
        _in_wire=('wire', direct), _sums_are_apart=True, _run=run)
    assert _Bench.seconds(apart) == pytest.approx(TRUE)
    in_wire = types.SimpleNamespace(
        _direct=('wire', direct), _in_wire=('wire', direct),
        _sums_are_apart=False, _run=run)
    assert _Bench.seconds(in_wire) == pytest.approx({
        **dict.fromkeys(TRUE, 0.0),
        **{name: TRUE[name] for name in ('encode', 'decode', 'add')}})


def test_a_rate_is_the_median_and_infinite_for_what_takes_no_time():
    assert _rate([0.5, 0.25, 0.2]).value == 4
    assert _rate([0.0, 0.0]) == Figure(math.inf)
    # Noise: the difference of two runs may be less than nothing.
    assert _rate([-0.1, 0.5, 0.25]) == Figure.of([2, 4])
