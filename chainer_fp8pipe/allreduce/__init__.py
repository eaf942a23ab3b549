"""All-reduces: plans as data, what runs them, and the queue of buckets.

Nothing is imported here, so that plans, which are pure data, can be used
without MPI.
"""
