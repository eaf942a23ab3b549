"""How measurements use a codec that no communicator has."""
from __future__ import annotations


def begin(codec, tensors, maximum):
    """Starts an update of one group of tensors.

    Args:
        codec: Of the wire.
        tensors: The group.
        maximum: Replaces a float32 array by its element-wise maximum over
            all ranks.
    """
    codec.start(tensors.loss_scale)
    found = codec.propose(tensors)
    if found is not None:
        maximum(found)
    codec.settle(tensors, found)
