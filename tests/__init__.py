# Lets the tests import chainer; "as" says that it is meant to be unused.
import chainer_fp8pipe as chainer_fp8pipe
