"""Can this interpreter set the project up?  Else one line that says why not.

Run by ``make`` before it makes .venv.  Kept to what a much older Python can
parse, so that an old Python gets the line and not a syntax error.
"""
import os
import sys
import sysconfig


def missing():
    """The first thing missing, with its remedy; None if all is there."""
    version = 'Python ' + '.'.join(map(str, sys.version_info[:3]))
    if not (3, 10) <= sys.version_info[:2] <= (3, 14):
        return (version + ' is not supported, 3.10 to 3.14 are: name one, as '
                'in  PYTHON=python3.12 make demo')
    from importlib.util import find_spec
    from shutil import which
    for module in 'venv', 'ensurepip':
        if not find_spec(module):
            return (version + ' has no ' + module + ': install it '
                    '(Debian, Ubuntu: apt install python3-venv)')
    compiler = (os.environ.get('CC') or sysconfig.get_config_var('CC')
                or 'cc').split()[0]
    if not which(compiler):
        return ('there is no C compiler: ' + compiler + ' was not found; '
                'install one (Debian, Ubuntu: apt install gcc) or name one '
                'with CC=')
    header = os.path.join(sysconfig.get_paths()['include'], 'Python.h')
    if not os.path.exists(header):
        return (version + ' lacks its C header ' + header + ': install it '
                '(Debian, Ubuntu: apt install python3-dev)')
    return None


if __name__ == '__main__':
    found = missing()
    if found:
        sys.exit('Cannot set up: ' + found)
