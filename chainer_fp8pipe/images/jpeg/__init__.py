"""The index of a JPEG's codes, with which a part of it becomes a JPEG."""
