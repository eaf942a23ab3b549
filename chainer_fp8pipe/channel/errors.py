"""Errors that ranks of a pipeline tell one another."""
from __future__ import annotations


class RemoteError(RuntimeError):
    """Another rank failed; the message is what that rank said of it."""
