"""Memory that other ranks of a node, and GPUs, read."""
