"""The main module of a script's worker that spawn or forkserver started."""
import os

from chainer_fp8pipe.compat import _old_names

_old_names.run_main(os.environ[_old_names.MAIN], globals())
