"""Stands for ``mpiexec``: each start runs the next script of a folder.

    MPIEXEC='python fake_mpiexec.py FOLDER'

runs ``FOLDER/0.py``, then ``FOLDER/1.py`` and so on, the last one again and
again, and appends its command line to ``FOLDER/commands``.
"""
import os
import runpy
import shlex
import sys

if __name__ == '__main__':
    folder, *arguments = sys.argv[1:]
    if arguments == ['--version']:
        print('HYDRA build details:')
        sys.exit()
    commands = os.path.join(folder, 'commands')
    with open(commands, 'a+') as file:
        file.seek(0)
        start = len(file.readlines())
        file.write(shlex.join(arguments) + '\n')
    scripts = [name for name in os.listdir(folder) if name.endswith('.py')]
    os.chdir(folder)
    runpy.run_path(f'{min(start, len(scripts) - 1)}.py')
