"""Measures codecs, and what an exchange takes beside the wire."""
