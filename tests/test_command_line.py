"""Wrong arguments of every command: a line, a hint, and the exit code 2."""
from argparse import ArgumentTypeError

from chainer_fp8pipe import __version__
from chainer_fp8pipe.__main__ import main
from chainer_fp8pipe.command_line import Interval, parse_interval
from chainer_fp8pipe.mpi import ALONE

import pytest

WRONG = [
    ('', 'arguments are required: COMMAND'),
    ('rum x.py', "invalid choice: 'rum' (choose from"),
    ('run', 'arguments are required: SCRIPT'),
    ('run nothing.py', 'nothing.py cannot be read as a script: No such'),
    ('run nowhere/ok.py', 'nowhere/ok.py cannot be read'),
    ('run folder', 'folder cannot be read as a script: Is a directory'),
    ('run --snap saved ok.py', 'unrecognized arguments: --snap'),
    ('run -n 4 ok.py', 'unrecognized arguments: -n'),
    ('run --snapshots', '--snapshots: expected one argument'),
    ('run --snapshots ok.py ok.py', '--snapshots ok.py: File exists'),
    ('run --snapshots saved --every 5 ok.py', "--every: '5' is no interval"),
    ('run --every 5m ok.py', '--every is an option of --snapshots'),
    ('run --communicator fp8 --period x ok.py', 'period must be of type int'),
    ('run --warmup=-1 ok.py', 'warmup must be at least 0, not -1'),
    ('run --communicator naive --warmup 3 ok.py', "no option 'warmup'"),
    ('run --memory 1GB ok.py', '--memory is an option of --pipeline'),
    ('run --pipeline 1 --micro-batches 0 ok.py', "'0' is not 1 or more"),
    ('run --pipeline 1 --schedule x ok.py', "invalid choice: 'x'"),
    ('run --communicator fp9 ok.py', "invalid choice: 'fp9' (choose from"),
    ('run --communicator fp8 --period -1 ok.py', 'period must be at least 1'),
    ('run --pipeline ok.py', "--pipeline: 'ok.py' is not 1 or more"),
    ('run --pipeline -1 ok.py', "--pipeline: '-1' is not 1 or more"),
    ('run --pipeline 2 ok.py', 'does not divide the 1 rank that'),
    *((f'run --pipeline 1 --memory {size} ok.py',
       f"--memory: '{size}' is no size; write it as in 300 MB")
      for size in ('inf', 'nan', '0', '3e', 'much')),
    ('plan --codecs float32,fp9 ok.py', "'fp9' is none of "),
    ('plan -o /nowhere/plan.json ok.py', '-o: /nowhere/plan.json cannot be'),
    ('plan -o folder ok.py', '-o: folder cannot be written'),
    ('run --memory -3MB ok.py', '--memory: expected one argument'),
    ('plan --seconds inf ok.py', "--seconds: 'inf' is no number"),
    ('bench allreduce', 'mpiexec -n 2'),
    ('bench allreduce --codecs fp9', "'fp9' is none of "),
    ('bench allreduce --sizes inf', "'inf' is no number, such as"),
    ('bench allreduce --sizes 8x', "'8x' is no number, such as"),
    ('bench allreduce --algorithms tree', "'tree' is none of direct"),
    ('bench allreduce --repeats ²', "--repeats: '²' is not 1 or more"),
    ('bench allreduce surplus', 'unrecognized arguments: surplus'),
    ('export model.npz', 'arguments are required: --class'),
    ('report', 'arguments are required: FOLDER'),
    ('report folder', "'folder' has no record"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'ok.py').write_text('print("ran")')
    (tmp_path / 'folder').mkdir()


@pytest.mark.parametrize(('line', 'message'), WRONG)
def test_a_wrong_line_is_refused_in_one_with_a_hint(
        folder, capsys, line, message):
    with pytest.raises(SystemExit) as refused:
        main(line.split())
    said, printed = capsys.readouterr().err, capsys.readouterr().out
    assert refused.value.code == 2
    assert not printed
    first, hint = said.splitlines()
    assert first.startswith('python -m chainer_fp8pipe')
    assert message in first
    assert hint.endswith('--help)')


@pytest.mark.parametrize('command', ['export', 'launch', 'report'])
@pytest.mark.parametrize('rank', '01')
def test_what_mpiexec_starts_several_times_is_refused_once(
        command, rank, capsys, monkeypatch):
    monkeypatch.delenv(ALONE, raising=False)
    monkeypatch.setenv('PMI_SIZE', '2')
    monkeypatch.setenv('PMI_RANK', rank)
    with pytest.raises(SystemExit) as refused:
        main([command, '--help'])
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert said.endswith('started 2 processes; start one, without mpiexec\n'
                         * (rank == '0'))
    assert bool(said) == (rank == '0')


def test_the_version_is_said(capsys):
    with pytest.raises(SystemExit) as exit:
        main(['--version'])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f'chainer_fp8pipe {__version__}\n'


@pytest.mark.parametrize(('text', 'interval'), [
    ('30s', Interval(30, 'second')), ('5m', Interval(300, 'second')),
    ('1.5 h', Interval(5400, 'second')),
    ('100 iterations', Interval(100, 'iteration')),
    ('1 iteration', Interval(1, 'iteration')),
    ('1 epoch', Interval(1, 'epoch')), ('0.5 epochs', Interval(.5, 'epoch')),
])
def test_an_interval_is_read(text, interval):
    assert parse_interval(text) == interval


def test_what_is_no_interval_is_named():
    for text in '', '5', 'm', '0s', '-1s', '5 days', '1.5 iterations', '1e3s':
        with pytest.raises(ArgumentTypeError, match='is no interval; write'):
            parse_interval(text)
