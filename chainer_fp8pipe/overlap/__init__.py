"""Exchanges that go on beside backward and the next forward."""
