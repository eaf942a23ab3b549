"""Tries ways to train a model, and carries out the fastest."""
