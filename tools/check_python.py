"""Can this interpreter set the project up?  Else one line that says why not.

Run by ``make`` before it makes .venv.  Kept to what a much older Python can
parse, so that an old Python gets the line and not a syntax error.
"""
import os
import sys
import sysconfig


def missing():
    """What is missing, with its remedy; '' if all is there."""
    if not (3, 10) <= sys.version_info[:2] <= (3, 14):
        return ('is not supported, 3.10 to 3.14 are: name one, as in  '
                'PYTHON=python3.12 make demo')
    from shutil import which
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return 'has no venv: install it (Debian: apt install python3-venv)'
    compiler = os.environ.get('CC') or sysconfig.get_config_var('CC') or 'cc'
    if not which(compiler.split()[0]):
        return ('needs a C compiler, and there is no ' + compiler + ': '
                'install one (Debian: apt install gcc) or name one with CC=')
    header = os.path.join(sysconfig.get_paths()['include'], 'Python.h')
    if not os.path.exists(header):
        return 'lacks ' + header + ' (Debian: apt install python3-dev)'
    return ''


found = missing()
if found:
    sys.exit('Cannot set up: Python ' + sys.version.split()[0] + ' ' + found)
