"""The language example: its text, its models, and a run in one process."""
import json
import math
import shutil
from collections import Counter

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import run_script

from .runs import (
    EXAMPLES,
    arrays,
    check_refusals,
    module,
    quick_initial_values,
)

SCRIPT = EXAMPLES / 'language' / 'train_language.py'
# Some seconds, most of them for the imports.
TINY = ('--units', '32', '--layers', '2', '--heads', '2', '--length', '16',
        '--vocabulary', '300', '--characters', '60000', '--lr', '0.01')


text = module('language', 'text')
models = module('language', 'models')


def trained(out, *arguments, length=('--iterations', '40')):
    """Runs the example, and returns what is printed."""
    done = run_script(0, SCRIPT, *TINY, *length, *arguments, '--out', out)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the text ----------------------------------------------------------------

SAMPLE = b'def low(lower, lowest):\n    return lower + lowest + low\n' * 3
snippets = st.one_of(st.binary(max_size=60), st.lists(st.sampled_from([
    b'low', b'lower', b' lowest', b'\n    ', b'return', b'\xc3\xa9', b'(',
    b'  ', b'\r\n', b'\0', b'_x1'])).map(b''.join))


def naive_pairs(pieces, number):
    """Counts all pairs again for each one that becomes a token."""
    found = []
    while len(found) < number:
        counts = Counter(
            pair for piece in pieces for pair
            in zip(piece, piece[1:], strict=False))
        if not counts or max(counts.values()) < 2:
            break
        found.append(min(counts, key=lambda pair: (-counts[pair], pair)))
        pieces = [naive_merge(piece, found[-1], 255 + len(found))
                  for piece in pieces]
    return found


def naive_merge(piece, pair, token):
    merged = []
    for entry in piece:
        if merged and (merged[-1], entry) == pair:
            merged[-1] = token
        else:
            merged.append(entry)
    return merged


@settings(max_examples=50)
@given(snippets, st.integers(256, 300))
def test_learned_are_the_commonest_pairs(sample, size):
    pieces = [list(piece) for piece in text._PIECE.findall(sample)]
    alphabet = text.Alphabet.learned(sample, size)
    assert alphabet.pairs == naive_pairs(pieces, size - 256)


@settings(max_examples=50)
@given(snippets, st.sampled_from([256, 270, 300]))
def test_a_text_becomes_pairs_in_the_order_they_were_learned_and_back(
        sample, size):
    alphabet = (text.Alphabet() if size == 256
                else text.Alphabet.learned(SAMPLE, size))
    expected = []
    for piece in text._PIECE.findall(sample):
        tokens = list(piece)
        for number, pair in enumerate(alphabet.pairs):
            tokens = naive_merge(tokens, pair, 256 + number)
        expected += tokens
    found = alphabet.encode(sample)
    assert found.dtype == numpy.int32
    assert found.tolist() == expected
    assert alphabet.decode(found) == sample


def write_sources(root, names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'# {name}\n')


def test_a_file_is_on_the_side_that_its_name_says(tmp_path):
    names = [f'module{number}.py' for number in range(60)]
    write_sources(tmp_path / 'a', names)
    write_sources(tmp_path / 'b', [*names[20:], 'package/other.py'])
    lines = [[set(part.splitlines()) for part in text.read(
        10 ** 6, tmp_path / root)] for root in ('a', 'b')]
    training, validation = lines[0]
    assert training | validation == {f'# {name}'.encode() for name in names}
    assert not training & validation
    assert len(training) > 4 * len(validation) > 0
    assert lines[1][0] - {b'# package/other.py'} < training
    assert lines[1][1] - {b'# package/other.py'} <= validation


def test_a_machine_without_sources_is_an_error(tmp_path):
    with pytest.raises(ValueError, match='do not make two texts'):
        text.read(1000, tmp_path)


def test_a_cache_is_of_one_text_and_one_vocabulary(tmp_path, monkeypatch):
    path = tmp_path / 'tokens.npz'
    first = text.prepare(30_000, 280)
    text.save(first, 280, path)
    others = [text.prepare(*sizes, path) for sizes in (
        (30_000, 290), (30_000, 0), (20_000, 280))]
    assert [len(other.alphabet) for other in others] == [290, 256, 280]
    assert len({other.digest for other in others}) == 2
    # What is in the cache is not computed.
    monkeypatch.setattr(text.Alphabet, 'encode', None)
    again = text.prepare(30_000, 280, path)
    assert again.alphabet.words == first.alphabet.words
    assert numpy.array_equal(again.training, first.training)
    assert numpy.array_equal(again.validation, first.validation)


def test_windows_are_followed_by_the_next_tokens():
    windows = text.Windows(numpy.arange(13), 4)
    assert [(x.tolist(), t.tolist()) for x, t in windows] == [
        (list(range(start, start + 4)), list(range(start + 1, start + 5)))
        for start in (0, 4, 8)]
    assert len(text.Windows(numpy.arange(12), 4)) == 2
    assert len(text.Windows(numpy.arange(12), 4, most=1)) == 1
    assert len(text.Windows(numpy.arange(0), 4)) == 0


# --- the models --------------------------------------------------------------

def tiny(name, **options):
    numpy.random.seed(0)
    return models.MODELS[name](11, 6, **{
        'units': 8, 'layers': 2, 'heads': 2, **options})


def tokens(*shape):
    return numpy.random.RandomState(1).randint(
        0, 11, shape).astype(numpy.int32)


both = pytest.mark.parametrize('name', ['decoder', 'lstm'])


@both
def test_the_loss_is_the_mean_cross_entropy(name):
    model, x, t = tiny(name), tokens(3, 6), tokens(4, 6)[1:]
    reporter = chainer.Reporter()
    reporter.add_observer('main', model)
    with reporter:
        loss = model(x, t)
    chances = F.softmax(model.logits(x), axis=2).array
    expected = -numpy.log(numpy.take_along_axis(
        chances, t[..., None], 2)).mean()
    assert loss.array == pytest.approx(expected, rel=1e-5)
    # It knows nothing yet.
    assert loss.array == pytest.approx(math.log(11), rel=0.2)
    seen = reporter.observation
    assert seen['main/loss'].array == loss.array
    assert seen['main/accuracy'].array == pytest.approx(
        (chances.argmax(2) == t).mean())


@both
def test_later_tokens_change_nothing_before_them(name):
    model, x = tiny(name), tokens(2, 6)
    before = model.logits(x).array
    for place in range(6):
        other = x.copy()
        other[:, place] = (other[:, place] + 1) % 11
        changed = abs(model.logits(other).array - before).max(axis=(0, 2))
        assert not changed[:place].any()
        assert (changed[place:] > 0).all()


def test_attention_is_the_formula():
    numpy.random.seed(0)
    attention = models.Attention(6, 2)
    x = numpy.random.randn(1, 4, 6).astype('f')
    both_heads = numpy.zeros((4, 6))
    rows = x[0] @ attention.inputs.W.array.T
    for head in range(2):
        query, key, value = (rows[:, part * 6 + head * 3:][:, :3]
                             for part in range(3))
        for place in range(4):
            weights = numpy.exp(
                key[:place + 1] @ query[place] / math.sqrt(3))
            both_heads[place, head * 3:][:3] = (
                weights @ value[:place + 1] / weights.sum())
    numpy.testing.assert_allclose(
        attention(x).array[0], both_heads @ attention.outputs.W.array.T,
        atol=1e-6)


def test_a_layer_of_lstm_is_chainers():
    numpy.random.seed(0)
    layer, reference = models.LSTM(5, 0.0), L.LSTM(5, 5)
    reference.upward.copyparams(layer.upward)
    reference.lateral.copyparams(layer.lateral)
    x = numpy.random.randn(2, 4, 5).astype('f')
    for place, y in enumerate(F.separate(layer(x), axis=1)):
        expected = x[:, place] + reference(
            layer.norm(x[:, place])).array
        numpy.testing.assert_allclose(y.array, expected, atol=1e-5)


def test_the_default_decoder_has_25_million_parameters():
    sizes = {name: default for name, (default, _)
             in module('language', 'arguments').SIZES.items()
             if name in ('length', 'units', 'layers', 'heads')}
    with quick_initial_values():
        model = models.Decoder(1024, **sizes)
    assert model.count_params() == pytest.approx(25e6, rel=0.05)


# --- how many layers ---------------------------------------------------------

@given(st.integers(1, 8), st.integers(0, 300))
def test_the_most_layers_that_fit_are_found(least, most):
    def fits(layers):
        tried.append(layers)
        return layers <= most
    tried = []
    if most < least:
        with pytest.raises(ValueError, match=f'not even {least} layers fit'):
            module('language', 'filling').most_layers(fits, least)
    else:
        assert module('language', 'filling').most_layers(fits, least) == most
        assert len(tried) <= 4 + 2 * math.log2(most)


# --- a run -------------------------------------------------------------------

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """A run with dropout: what is printed, and where the results are."""
    out = tmp_path_factory.mktemp('language') / 'out'
    return trained(out, '--dropout', '0.1'), out


def log_of(out):
    return json.loads((out / 'log').read_text())


def test_it_ends_with_a_table_that_names_its_files(whole):
    printed, out = whole
    assert 'decoder: ' in printed
    assert 'total [' in printed             # the progress bar
    assert printed.count('validation/main/bpc') == 1
    table = printed[printed.index('\ntraining  '):]
    for name in ('curves.png', 'model.npz'):
        assert table.count(str(out / name)) == 1
        assert (out / name).stat().st_size > 5000
    summary = json.loads((out / 'summary.json').read_text())
    assert f'{summary["validation"]:.3f} bits per character' in table
    assert f'{summary["milliseconds"]:.1f} ms' in table


def test_bits_per_character_are_those_of_either_text(whole):
    _, out = whole
    log = log_of(out)
    assert [entry['iteration'] for entry in log] == list(range(4, 44, 4))
    parts = text.read(60_000)
    with numpy.load(out / 'tokens.npz') as saved:
        for part, place, name in zip(parts, ('main', 'validation/main'),
                                     ('training', 'validation'),
                                     strict=True):
            rate = len(saved[name]) / len(part) / math.log(2)
            for entry in log:
                assert entry[f'{place}/bpc'] == pytest.approx(
                    rate * entry[f'{place}/loss'])
            assert log[-1][f'{place}/bpc'] < 0.9 * log[0][f'{place}/bpc']


def test_the_model_can_be_loaded(whole):
    _, out = whole
    with numpy.load(out / 'tokens.npz') as saved:
        validation = saved['validation']
    model = models.Decoder(300, 16, units=32, layers=2, heads=2)
    chainer.serializers.load_npz(out / 'model.npz', model)
    windows = text.Windows(validation, 16, 8 * 8)
    with chainer.using_config('train', False):
        losses = [model(x[None], t[None]).item() for x, t in windows]
    assert numpy.mean(losses) == pytest.approx(
        log_of(out)[-1]['validation/main/loss'], rel=1e-4)


@pytest.mark.slow
def test_resumed_it_ends_with_the_same_bits(whole, tmp_path):
    out = shutil.copytree(whole[1], tmp_path / 'out')
    shutil.rmtree(out / 'snapshot_iter_40.ranks')
    (out / 'model.npz').unlink()
    assert 'goes on after iteration 36' in trained(
        out, '--dropout', '0.1', '--resume')
    assert arrays(out / 'model.npz') == arrays(whole[1] / 'model.npz')
    logs = [log_of(folder) for folder in (out, whole[1])]
    for entry in (*logs[0], *logs[1]):
        del entry['elapsed_time']
    assert logs[0] == logs[1]


@pytest.mark.slow
def test_a_second_run_keeps_the_firsts_results(whole, tmp_path):
    """And may be of another model, on bytes."""
    out = shutil.copytree(whole[1], tmp_path / 'out')
    printed = trained(out, '--model', 'lstm', '--vocabulary', '0')
    assert 'lstm: ' in printed
    assert '54,000 tokens of 256' in printed
    log = log_of(out)
    assert log[-1]['main/bpc'] < 0.9 * log[0]['main/bpc']
    assert log[-1]['main/bpc'] == pytest.approx(
        log[-1]['main/loss'] / math.log(2))
    assert arrays(tmp_path / 'out.1' / 'model.npz') == arrays(
        whole[1] / 'model.npz')


@pytest.mark.parametrize(('arguments', 'message'), [
    (['--vocabulary', '256'], "'256' is not a whole number above 256"),
    (['--layers', '0'], "'0' is not a whole number of at least 1"),
    (['--dropout', '1'], "'1' is not a number of at least 0 and less than 1"),
    (['--memory', 'much'], "'much' is no amount of memory, like 150MB"),
    (['--epoch', '1', '--iterations', '1'], 'not allowed with argument'),
])
def test_wrong_values_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit):
        module('language', 'arguments').make_parser('').parse_args(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(('ranks', 'cases'), [
    (1, [(['--units', '30', '--heads', '4'],
          '--units 30 is not a multiple of --heads 4'),
         (['--fill'], '--fill needs --memory SIZE'),
         (['--memory', '150MB'],
          '--memory is for a model that is divided over'),
         (['--characters', '500'], '--characters 500 is too small for a'),
         (['--characters', '5'], '5 characters of the Python sources')]),
    (2, [([*TINY, '--batchsize', '12'],
          '--batchsize 12 is not a multiple of 8: micro-batches (8) x'),
         ([*TINY, '--pipeline', '3'],
          'pipeline=3 does not divide the 2 ranks')])])
def test_what_is_wrong_is_explained_once_and_ends_all_ranks(
        tmp_path, ranks, cases):
    check_refusals(SCRIPT, cases, tmp_path / 'out', ranks)


def test_two_ranks_show_how_the_model_was_cut(tmp_path):
    done = run_script(
        2, SCRIPT, *TINY, '--batchsize', '8', '--micro-batches', '2',
        '--iterations', '2', '--memory', '200MB', '--out', tmp_path / 'out')
    assert done.returncode == 0, done.stderr
    assert 'Decoder: 2 stages, 1f1b with 2 micro-batches' in done.stdout
    table = done.stdout[done.stdout.index('\ntraining  '):]
    path = tmp_path / 'out' / 'plan.json'
    assert table.count(str(path)) == 1
    assert path.stat().st_size > 500
