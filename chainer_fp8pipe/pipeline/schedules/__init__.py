"""Schedules of a pipeline as data."""
