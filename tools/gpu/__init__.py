"""Everything that waits for a GPU, in one call: ``python -m tools.gpu``.

Only :mod:`.bits`, :mod:`.communicators` and :mod:`.device` use packages; the
rest runs on a bare Python, before there is an environment.
"""
