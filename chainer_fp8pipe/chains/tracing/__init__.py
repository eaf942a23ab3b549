"""The trace of a model: one run, written down call by call."""
