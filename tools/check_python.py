"""Can this interpreter set the project up?  Else one line that says why not.

Run by ``make`` before it makes .venv.  Kept to what a much older Python can
parse, so that an old Python gets the line and not a syntax error.
"""
import os
import shlex
import sys
import sysconfig

OLDEST, NEWEST = (3, 10), (3, 14)


def missing():
    """The first thing missing, with its remedy; None if all is there."""
    version = '.'.join(map(str, sys.version_info[:3]))
    if not OLDEST <= tuple(sys.version_info[:2]) <= NEWEST:
        return (
            'Python ' + version + ' is not supported, 3.10 to 3.14 are: '
            'name one, as in  PYTHON=python3.12 make demo'
        )
    from importlib.util import find_spec

    for module in 'venv', 'ensurepip':
        if not find_spec(module):
            return (
                'Python ' + version + ' has no ' + module + ': install it '
                '(Debian, Ubuntu: apt install python3-venv)'
            )
    return missing_compiler(version)


def missing_compiler(version):
    """The same for what the C extension needs."""
    import shutil

    command = os.environ.get('CC') or sysconfig.get_config_var('CC') or 'cc'
    compiler = shlex.split(command)[0]
    if not shutil.which(compiler):
        return (
            'there is no C compiler: ' + compiler + ' was not found; install '
            'one (Debian, Ubuntu: apt install gcc) or name one with CC='
        )
    headers = sysconfig.get_paths()['include']
    if not os.path.exists(os.path.join(headers, 'Python.h')):
        return (
            'Python ' + version + ' lacks its C header ' + headers
            + '/Python.h: install it (Debian, Ubuntu: apt install '
            'python3-dev)'
        )
    return None


if __name__ == '__main__':
    found = missing()
    if found:
        sys.exit('Cannot set up: ' + found)
