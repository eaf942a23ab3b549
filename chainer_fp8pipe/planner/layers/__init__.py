"""Measures a ``Divisible`` layer by layer."""
