"""``Divisible``: a model of numbered layers that can be cut into stages."""
