"""Ways to run a whole job: what they cost, and which one is taken."""
