from chainer_fp8pipe.images import memory

import pytest

GIB = 1 << 30
MEMINFO = """MemTotal: 16777216 kB
MemAvailable:    8388608 kB
HugePages_Total:       0
"""


@pytest.fixture
def files(monkeypatch):
    """Files as the system has them; what is not named is not there."""
    there = {'/proc/meminfo': MEMINFO}

    def read(path):
        if path not in there:
            raise FileNotFoundError(path)
        return there[path]
    monkeypatch.setattr(memory, '_read', read)
    return there


def group(files, folder, limit, used, cached, version=2):
    names = {2: ('memory.max', 'memory.current'),
             1: ('memory.limit_in_bytes', 'memory.usage_in_bytes')}[version]
    for name, value in zip(names, (limit, used), strict=True):
        files[f'{folder}/{name}'] = f'{value}\n'
    files[f'{folder}/memory.stat'] = (
        f'anon 5\nactive_file {cached}\ninactive_file {cached}\n')


def test_without_control_groups_memory_is_the_machines(files):
    assert memory.total_bytes() == 16 * GIB
    assert memory.available_bytes() == 8 * GIB


def test_a_control_group_of_this_process_limits_it(files):
    files['/proc/self/cgroup'] = '0::/slurm/job7\n'
    group(files, '/sys/fs/cgroup/slurm/job7', 4 * GIB, 3 * GIB, GIB // 2)
    assert memory.total_bytes() == 4 * GIB
    # Pages of files can be given back.
    assert memory.available_bytes() == 2 * GIB


def test_the_groups_that_it_is_in_count_as_well(files):
    files['/proc/self/cgroup'] = '0::/slurm/job7\n'
    group(files, '/sys/fs/cgroup/slurm/job7', 'max', GIB, 0)
    group(files, '/sys/fs/cgroup/slurm', 3 * GIB, GIB, 0)
    assert memory.total_bytes() == 3 * GIB


def test_version_1_is_known(files):
    files['/proc/self/cgroup'] = '9:name=systemd:/\n4:memory:/a\n0::/\n'
    group(files, '/sys/fs/cgroup/memory/a', 2 * GIB, GIB, 0, version=1)
    assert memory.total_bytes() == 2 * GIB
    assert memory.available_bytes() == GIB


def test_a_group_over_its_limit_has_nothing_left(files):
    files['/proc/self/cgroup'] = '0::/\n'
    group(files, '/sys/fs/cgroup', GIB, 2 * GIB, 0)
    assert memory.available_bytes() == 0


def test_another_system_has_no_such_files(files):
    files.clear()
    assert memory.total_bytes() == memory.available_bytes() > 0


def test_this_machine_has_memory():
    assert 0 < memory.available_bytes() <= memory.total_bytes()
