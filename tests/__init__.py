import chainer_fp8pipe  # noqa: F401  (lets the tests import chainer)
