"""ChainerMN's ``create_communicator`` is another one in a block."""
from chainer_fp8pipe.intercept.communicator_creation import creating

import chainermn
import chainermn.communicators
import pytest

OWNERS = chainermn, chainermn.communicators
ORIGINAL = chainermn.communicators.create_communicator


def test_both_names_call_the_other_function_until_the_block_ends():
    def create(*args, **kwargs):
        return args, kwargs
    with creating(create):
        for owner in OWNERS:
            assert owner.create_communicator('fp8', mpi_comm=1) == (
                ('fp8',), {'mpi_comm': 1})
    assert all(owner.create_communicator is ORIGINAL for owner in OWNERS)
    with pytest.raises(SystemExit), creating(create):
        raise SystemExit
    assert all(owner.create_communicator is ORIGINAL for owner in OWNERS)


def test_somebody_elses_function_is_not_called_and_comes_back(monkeypatch):
    def theirs():
        raise AssertionError
    monkeypatch.setattr(chainermn, 'create_communicator', theirs)
    with creating(lambda: 'ours'):
        assert chainermn.create_communicator() == 'ours'
    assert chainermn.create_communicator is theirs


def test_what_a_script_puts_there_stays(monkeypatch):
    monkeypatch.setattr(chainermn, 'create_communicator', ORIGINAL)

    def own():
        pass
    with creating(lambda: None):
        monkeypatch.setattr(chainermn, 'create_communicator', own)
    assert chainermn.create_communicator is own
    assert chainermn.communicators.create_communicator is ORIGINAL
