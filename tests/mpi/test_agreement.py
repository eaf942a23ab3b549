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
def test_a_problem_of_one_or_all_is_raised_on_all_with_its_rank(comm):
    agree(comm, Signature(MODEL))
    with pytest.raises(TypeError, match='^all ranks: bad$'):
        agree(comm, Signature(MODEL), 'bad', error=TypeError)
    last = comm.size - 1
    who = f'rank {last}' if last else 'all ranks'
    with pytest.raises(ValueError, match=f'^{who}: no gradient$'):
        agree(comm, Signature(MODEL),
              'no gradient' if comm.rank == last else '')


W1, W2 = MODEL


@on_ranks(2, 4)
@pytest.mark.parametrize(('other', 'message'), [
    ({**MODEL, W1: 'float32 (3, 4)'},
     r'parameter /l1/W is float32 \(3, 2\) on rank 0 but '
     r'float32 \(3, 4\) on rank {last}\. Do this\.'),
    ({W1: MODEL[W1]}, '/l2/W is float32 .* on rank 0 but missing on rank '
                      '{last}'),
    ({W2: MODEL[W2], W1: MODEL[W1]}, 'different order'),
])
def test_a_difference_names_entry_ranks_and_remedy(comm, other, message):
    last = comm.size - 1
    with pytest.raises(ValueError, match=message.format(last=last)):
        agree(comm, Signature(other if comm.rank == last else MODEL),
              remedy='Do this.')


@on_ranks(3)
def test_raise_together_tells_every_rank_of_one_ranks_error(comm):
    assert raise_together(comm, lambda: comm.rank) == comm.rank

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
