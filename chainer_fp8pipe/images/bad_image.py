"""The error about an image that cannot be used."""
from __future__ import annotations


class ImageError(ValueError):
    """One image cannot be used; the message names the file and why.

    Args:
        path: The file; '' where only its bytes are known, as in a decoder.
        reason: The fault and, where there is one, the remedy.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)      # so that it can be pickled
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f'{self.path}: {self.reason}' if self.path else self.reason
