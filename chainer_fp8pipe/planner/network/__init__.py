"""Measures the links between ranks."""
