"""The record of a run: pure data, its files, and the clocks of its ranks."""
