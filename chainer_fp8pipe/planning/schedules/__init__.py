"""Pipelines: predicted steps, and proofs that schedules end."""
