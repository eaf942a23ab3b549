"""A rank that fails ends the others, and is named."""
