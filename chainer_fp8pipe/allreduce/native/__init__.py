"""Compiled code that runs plans: messages, sums and fp8, without Python."""
