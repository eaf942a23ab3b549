"""Predicts all-reduces, and proves that their plans are right."""
