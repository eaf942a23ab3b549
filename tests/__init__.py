# Lets the tests import chainer.
from chainer_fp8pipe.compat import old_names

# To compile modules of tests for old names would take each rank seconds.
old_names._NOT.add('tests')
