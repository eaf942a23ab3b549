"""Snapshots: their file, the ranks' way to it, the state in it."""
