"""Encoded images to pixels."""
