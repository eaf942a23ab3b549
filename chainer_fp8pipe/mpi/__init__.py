"""Ranks: agreement, failure, grids and groups, waiting."""
