"""Content comes back; what is no JSON is named."""
from chainer_fp8pipe.planning.json_file import read_json

import pytest


@pytest.mark.parametrize(('content', 'found'), [
    (b'{"a": [1, 2.5, null]}', {'a': [1, 2.5, None]}),
    ('"\N{GREEK SMALL LETTER ALPHA}"'.encode(),
     '\N{GREEK SMALL LETTER ALPHA}')])
def test_the_content_of_a_file_is_read(tmp_path, content, found):
    path = tmp_path / 'some.json'
    path.write_bytes(content)
    assert read_json(str(path)) == found


@pytest.mark.parametrize(('content', 'reason'), [
    (b'', 'Expecting value: line 1 column 1 (char 0)'),
    (b'{"a": 1,}', '(char '), (b'\xff', "'utf-8' codec can't decode")])
def test_what_is_no_json_is_named_with_its_remedy(tmp_path, content, reason):
    path = tmp_path / 'some.json'
    path.write_bytes(content)
    with pytest.raises(ValueError, match='is no JSON') as caught:
        read_json(str(path))
    assert str(caught.value).startswith(f'{path} is no JSON: ')
    assert reason in str(caught.value)
    with pytest.raises(ValueError, match=r'\); write it again$') as caught:
        read_json(str(path), 'write it again')
    assert str(caught.value).startswith(f'{path} is no JSON (')
    assert reason in str(caught.value)


def test_a_file_that_is_not_there_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(str(tmp_path / 'no.json'))
