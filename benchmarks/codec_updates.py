"""How measurements and tests use a codec that no communicator has."""
from __future__ import annotations


def begin(codec, tensors, maximum=lambda array: None):
    """Starts an update of one group of tensors.

    Args:
        codec: Of the wire.
        tensors: The group.
        maximum: Replaces a float32 array by its element-wise maximum over
            all ranks; by default for one rank alone.
    """
    codec.start(tensors.loss_scale)
    found = codec.propose(tensors)
    if found is not None:
        maximum(found)
    codec.settle(tensors, found)
