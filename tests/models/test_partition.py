"""Any model, function and link: over ranks it computes what one rank does.

The loss is bit for bit that of one process, and no gradient is off by more
than 1e-5 of its norm.
"""
import contextlib

from chainer_fp8pipe.chains.placeholder import PlaceholderError

import pytest

from tests.models import MODELS
from tests.models.calls import CALLS, LEFT_OUT, F, L
from tests.models.judge import SCHEDULES, Refused, judge_function, judge_model
from tests.ranks import on_ranks

#: Models that are refused in these words, on 2 ranks or more.
REFUSED = {'actor_critic': '__float__ needs the value',
           'gradient_penalty': 'a gradient needs the value',
           'halting': '__bool__ needs the value',
           'moving_average': 'add, which writes, needs the value'}
QUICK = 'skip_mlp', 'maxout'


def each(names, quick):
    return [pytest.param(name, marks=() if name in quick
                         else pytest.mark.slow) for name in names]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize('name', each(MODELS, QUICK))
@on_ranks(pytest.param(2, marks=pytest.mark.slow), 3,
          pytest.param(4, marks=pytest.mark.slow), timeout=1500)
def test_a_model_trains_as_in_one_process(comm, name):
    if MODELS[name].slow and comm.size > 2:
        pytest.skip('takes long, and gigabytes')
    if name == 'stacked_lstm':
        # Cells that make their weights in their first forward pass are one
        # call each; the reference, which is given weights, has many, and so
        # dropout draws other masks.
        pytest.skip('it has no reference')
    known = {}
    for schedule, chunks in SCHEDULES:
        refused = ''
        try:
            judge_model(comm, MODELS[name], schedule, chunks, known)
        except Refused as error:
            refused = str(error)
        if 'parts at most' not in refused:
            assert REFUSED.get(name, '') in refused
            assert (name in REFUSED) == bool(refused)


@pytest.mark.timeout(900)
@pytest.mark.parametrize('name', each(sorted(CALLS), (
    'cholesky', 'dropout', 'Linear')))
@on_ranks(2, timeout=600)
def test_a_function_can_be_cut_at_every_place(comm, name):
    with (pytest.raises(PlaceholderError, match='as_strided needs the value')
          if name == 'as_strided' else contextlib.nullcontext()):
        assert judge_function(comm, CALLS[name]) > 2


def test_every_function_has_a_call_or_a_reason():
    names = {name for module in (F, L) for name in dir(module)
             if callable(getattr(module, name)) and not name.startswith('_')}
    assert names == {*CALLS, *LEFT_OUT}
