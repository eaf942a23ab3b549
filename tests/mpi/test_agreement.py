"""All ranks agree or raise the same."""
from chainer_fp8pipe.mpi.agreement import (
    agree,
    are_equal,
    of_first_rank,
    raise_together,
)

import pytest

from tests.ranks import on_ranks

W1, W2 = 'parameter /l1/W', 'parameter /l2/W'
MODEL = {W1: 'float32 (3, 2)', W2: 'float32 ()'}


@on_ranks(1, 3)
def test_a_problem_of_one_or_all_is_raised_on_all_with_its_rank(comm):
    agree(comm, MODEL)
    with pytest.raises(TypeError, match='^all ranks: bad$'):
        agree(comm, MODEL, 'bad', error=TypeError)
    last = comm.size - 1
    who = f'rank {last}' if last else 'all ranks'
    with pytest.raises(ValueError, match=f'^{who}: no gradient$'):
        agree(comm, MODEL, 'no gradient' if comm.rank == last else '')

    def action():
        if comm.rank == last:
            raise OSError('disk full')
    assert raise_together(comm, lambda: comm.rank) == comm.rank
    with pytest.raises(RuntimeError, match=f'{who}: OSError: disk full'):
        raise_together(comm, action)


@on_ranks(1, 3)
@pytest.mark.parametrize(('error', 'kind', 'message'), [
    (ValueError('no plan'), ValueError, '^no plan$'),
    (UnicodeError('no text'), UnicodeError, '^no text$'),
    (OSError('disk full'), ValueError, '^OSError: disk full$')])
def test_what_the_first_rank_finds_or_its_error_is_on_all(comm, error, kind,
                                                          message):
    assert of_first_rank(comm, lambda: ('found', comm.rank)) == ('found', 0)

    def choose():
        assert comm.rank == 0
        raise error
    with pytest.raises(kind, match=message):
        of_first_rank(comm, choose)


@on_ranks(2)
def test_another_order_is_a_difference(comm):
    with pytest.raises(ValueError, match='different order'):
        agree(comm, {W2: MODEL[W2], W1: MODEL[W1]} if comm.rank else MODEL)


@on_ranks(1, 3)
def test_numbers_of_64_bits_are_compared(comm):
    for number in 0, 1, 1 << 63, (1 << 64) - 1:
        assert are_equal(comm, number)
        other = number ^ (1 << 40) if comm.rank == 1 else number
        assert are_equal(comm, other) == (comm.size == 1)
