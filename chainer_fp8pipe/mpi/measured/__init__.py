"""Measures links and clocks, with messages between ranks."""
