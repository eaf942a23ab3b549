"""One run of a model, written down call by call."""
