"""The built documentation: how long it is."""
import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / 'docs'
#: Words of an article that anybody should be asked to read, by folder.
MOST_WORDS = {'.': 25_000, 'api': 8_000, 'benchmarks': 1_500}

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    """The folder of the pages."""
    for needed in 'sphinx', 'furo', 'sphinx_copybutton':
        pytest.importorskip(needed)
    place = tmp_path_factory.mktemp('site')
    done = subprocess.run(
        [sys.executable, '-m', 'sphinx', '-q', '-b', 'html', '-d',
         place / 'doctrees', DOCS, place / 'html'],
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return place / 'html'


def pages_of(site):
    """Pages that somebody wrote: path from the site's root, and HTML."""
    made = 'genindex.html', 'py-modindex.html', 'search.html'
    return {path.relative_to(site): path.read_text()
            for path in sorted(site.rglob('*.html')) if path.name not in made}


def words(text):
    """How many a page's article has: code and tables, too; a formula is one.
    """
    article = re.search(r'(?s)<article[^>]*>(.*)</article>', text)[1]
    article = re.sub(r'(?s)<math.*?</math>', 'x', article)
    return len(html.unescape(re.sub(r'<[^>]+>', ' ', article)).split())


def test_the_site_is_not_too_long_to_read(site):
    counted = {path: words(text) for path, text in pages_of(site).items()}
    for folder, most in MOST_WORDS.items():
        inside = {path: count for path, count in counted.items()
                  if path.is_relative_to(folder)}
        assert inside
        assert sum(inside.values()) <= most, sorted(
            inside.items(), key=lambda row: -row[1])[:10]
