"""What decides how a model is run: pure data and arithmetic, no MPI.

Calls of a traced model with their costs, where it can be cut, and the search
for the cut whose step is shortest under a memory limit.
"""
