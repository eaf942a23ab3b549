import os

import pytest

from .jobs import Job


@pytest.fixture
def job(tmp_path):
    if not hasattr(os, 'pidfd_open'):
        pytest.skip('there is no watchdog here')
    made = Job(tmp_path / 'script.py')
    yield made
    made.end()
