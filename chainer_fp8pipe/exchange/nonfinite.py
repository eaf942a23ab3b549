"""Means that are NaN or infinite: whether they are errors, and whose."""
from __future__ import annotations

from collections.abc import Sequence

from ..codecs import State
from ..mpi.agreement import raised_by_all
from .lockstep import Lockstep
from .model_state import ModelState

_REMEDY = ('Lower the learning rate, clip gradients, scale the loss, or pass '
           "nonfinite='pass' to create_communicator")


class NonfiniteMean(RuntimeError):
    """A mean is NaN or infinite, which the option ``nonfinite`` forbids."""


def must_be_finite(wanted: str, state: ModelState) -> bool:
    """Whether an update of a model must not go on with such a mean.

    Args:
        wanted: The option ``nonfinite``.
        state: Of the model.
    """
    if wanted == 'auto':
        return not state.scaling_is_dynamic
    return wanted == 'raise'


def everywhere(lockstep: Lockstep, state: State, names: Sequence[str],
               wire_is_finite: bool) -> NonfiniteMean:
    """The same error on all ranks, before any parameter is updated.

    Args:
        lockstep: The ranks.
        state: Of the codec of this update.
        names: Parameters whose mean is not finite.
        wire_is_finite: The wire is, on all ranks; so that it is a matter of
            this rank.
    """
    if wire_is_finite:      # so the others need not be here
        return NonfiniteMean(
            f'the value of {names[0]}, or its product with the ratio, is not '
            f'finite on rank {lockstep.comm.rank}. No parameter was updated '
            f'here. {_REMEDY}.')
    culprits = [
        f'{found[0]} is not finite in {state.codec.name} on rank {rank}'
        + (f' (and {len(found) - 1} more)' if found[1:] else '')
        for rank, found in enumerate(lockstep.allgather(state.nonfinite))
        if found]
    text = '; '.join(culprits) or (
        f'the sum of the gradients of {names[0]} overflowed')
    return raised_by_all(NonfiniteMean(
        f'{text}. No parameter was updated. {_REMEDY}.'))


def here(state: State, name: str) -> NonfiniteMean:
    """The error of a rank that has looked at a mean, maybe alone.

    Args:
        state: Of the codec of this update.
        name: The parameter.
    """
    reason = 'it is not so on this rank, but on another, or the sum overflowed'
    if state.nonfinite:
        reason = (f'{state.nonfinite[0]} is not finite in {state.codec.name} '
                  'on this rank')
    return raised_by_all(NonfiniteMean(     # each at its own look
        f'the mean of the gradients of {name} is not finite: {reason}. Other '
        'parameters may have been updated: go on from a snapshot, with a new '
        'model and communicator. '
        f'{_REMEDY}; with overlap=True no parameter is updated, and all ranks '
        'name the rank'))
