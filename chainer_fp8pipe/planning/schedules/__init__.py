"""Predicts the steps of pipelines, and proves that schedules end."""
