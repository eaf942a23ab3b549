"""The main module of a script's worker that spawn or forkserver started."""
import os

from chainer_fp8pipe.compat import old_names

old_names.run_main(os.environ[old_names.MAIN], globals())
