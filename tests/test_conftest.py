"""The settings of the tests themselves."""
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st


def examples():
    """What a property-based test tries."""
    tried = []

    @settings(max_examples=20)
    @given(st.floats())
    def trying(number):
        tried.append(number.hex())
    trying()
    return tried


def test_property_based_tests_try_the_same_examples_each_time():
    assert examples() == examples()


def test_processes_that_tests_start_keep_what_they_compile(tmp_path):
    (tmp_path / 'module.py').write_text('value = 1')
    subprocess.run([sys.executable, '-c', 'import module'], cwd=tmp_path,
                   check=True)
    assert list(tmp_path.glob('__pycache__/module.*.pyc'))
