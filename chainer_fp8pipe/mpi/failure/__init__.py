"""Ranks that fail: the others end, and the one that failed is named."""
