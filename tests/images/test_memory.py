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


@pytest.mark.parametrize(('cgroup', 'groups', 'total', 'available'), [
    (None, [], 16, 8),
    # Pages of files can be given back.
    ('0::/slurm/job7\n', [('/slurm/job7', 4 * GIB, 3 * GIB, GIB // 2)], 4, 2),
    ('0::/slurm/job7\n', [('/slurm/job7', 'max', GIB, 0),
                          ('/slurm', 3 * GIB, GIB, 0)], 3, 2),
    ('9:name=systemd:/\n4:memory:/a\n0::/\n',
     [('/memory/a', 2 * GIB, GIB, 0, 1)], 2, 1),
    ('0::/\n', [('', GIB, 2 * GIB, 0)], 1, 0),
])
def test_memory_is_what_the_machine_and_its_control_groups_leave(
        files, cgroup, groups, total, available):
    if cgroup:
        files['/proc/self/cgroup'] = cgroup
    for folder, *numbers in groups:
        group(files, '/sys/fs/cgroup' + folder, *numbers)
    assert memory.total_bytes() == total * GIB
    assert memory.available_bytes() == available * GIB


def test_another_system_has_no_such_files_and_this_one_has_memory(
        files, monkeypatch):
    files.clear()
    assert memory.total_bytes() == memory.available_bytes() > 0
    monkeypatch.undo()
    assert 0 < memory.available_bytes() <= memory.total_bytes()
