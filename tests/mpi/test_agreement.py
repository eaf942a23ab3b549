from chainer_fp8pipe.mpi.agreement import (
    Signature,
    agree,
    are_equal,
    raise_together,
)

import pytest

from tests.ranks import on_ranks

MODEL = {'parameter /l1/W': 'float32 (3, 2)', 'parameter /l2/W': 'float32 ()'}


@on_ranks(1, 3)
def test_ranks_with_the_same_signature_agree(comm):
    agree(comm, Signature(MODEL))


@on_ranks(2, 4)
def test_a_problem_on_the_last_rank_is_raised_on_all_with_its_number(comm):
    last = comm.size - 1
    with pytest.raises(ValueError, match=f'^rank {last}: no gradient$'):
        agree(comm, Signature(MODEL),
              'no gradient' if comm.rank == last else '')


@on_ranks(4)
def test_the_same_problem_everywhere_is_raised_everywhere(comm):
    with pytest.raises(TypeError, match='^all ranks: bad$'):
        agree(comm, Signature(MODEL), 'bad', error=TypeError)


@on_ranks(2, 4)
def test_a_difference_names_entry_ranks_and_remedy(comm):
    mine = dict(MODEL)
    if comm.rank == comm.size - 1:
        mine['parameter /l1/W'] = 'float32 (3, 4)'
    with pytest.raises(
            ValueError, match=r'parameter /l1/W is float32 \(3, 2\) on rank '
            rf'0 but float32 \(3, 4\) on rank {comm.size - 1}. Do this.'):
        agree(comm, Signature(mine), remedy='Do this.')


@on_ranks(3)
def test_an_entry_that_one_rank_lacks_is_named(comm):
    mine = dict(MODEL)
    if comm.rank == 1:
        del mine['parameter /l2/W']
    with pytest.raises(ValueError, match='/l2/W is float32 .* on rank 0 but '
                       'missing on rank 1'):
        agree(comm, Signature(mine))


@on_ranks(2)
def test_a_different_order_is_a_difference(comm):
    items = list(MODEL.items())
    mine = dict(reversed(items)) if comm.rank else dict(items)
    with pytest.raises(ValueError, match='different order'):
        agree(comm, Signature(mine))


@on_ranks(3)
def test_raise_together_returns_what_the_action_returns(comm):
    assert raise_together(comm, lambda: comm.rank) == comm.rank


@on_ranks(3)
def test_raise_together_tells_every_rank_of_one_ranks_error(comm):
    def action():
        if comm.rank == 2:
            raise OSError('disk full')
    with pytest.raises(RuntimeError, match='rank 2: OSError: disk full'):
        raise_together(comm, action)


@on_ranks(1, 3)
@pytest.mark.parametrize('number', [0, 1, 1 << 63, (1 << 64) - 1])
def test_numbers_of_64_bits_are_compared(comm, number):
    assert are_equal(comm, number)
    other = number ^ (1 << 40) if comm.rank == 1 else number
    assert are_equal(comm, other) == (comm.size == 1)
