"""How a job is best run: what was measured, what is predicted and chosen.

A *job* is a model, its batch and its ranks.  What was measured of them is a
:class:`.JobProfile`; a way to run the job is a :class:`.Configuration`, whose
step is simulated on the engine; the search takes the fastest of all that fit.
"""
