"""Processes that read samples for a rank, and what they share with it."""
