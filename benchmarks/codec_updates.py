"""How measurements and tests use a codec that no communicator has."""
from __future__ import annotations


def begin(state, tensors, maximum=lambda array: None, prescale=1.0,
          loss_scale=1.0):
    """Begins an update of one group of tensors; returns them, coded.

    Args:
        state: Of a codec.
        tensors: The group.
        maximum: Replaces a float32 array by its element-wise maximum over
            all ranks; by default for one rank alone.
        prescale: As for ``Codec.step``.
        loss_scale: The factor of the gradients.
    """
    codec = state.codec
    codec.begin(state, loss_scale)
    found = codec.propose(state, tensors)
    if found is not None:
        maximum(found)
    codec.step(state, tensors, found, prescale)
    return tensors
