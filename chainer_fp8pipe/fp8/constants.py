"""The numbers of the E5M2 format, and the names of its roundings."""

#: The largest finite value.
MAX = 57344.0

#: The smallest positive value.
TINY = 2.0 ** -16

#: Names of the roundings; their order is that of the header's numbers.
ROUNDINGS = ('nearest', 'truncate', 'stochastic')
