"""Sphinx settings: API from docstrings, nothing from other sites.

The pages need no network, neither to build nor to read: equations are MathML,
which docutils makes and browsers draw, and fonts are the reader's own.
"""
import re

from chainer_fp8pipe._version import __version__

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml

project = 'chainer_fp8pipe'
author = 'the chainer_fp8pipe authors'
version = release = __version__

extensions = [
    'sphinx.ext.autodoc',
    'sphinx.ext.napoleon',
    'sphinx_copybutton',
]
exclude_patterns = ['_build']
nitpicky = False
autodoc_member_order = 'bysource'
autodoc_typehints = 'description'

html_theme = 'furo'
html_title = f'{project} {release}'
html_static_path = ['_static']
html_css_files = ['pages.css']
html_math_renderer = 'mathml'
copybutton_prompt_text = r'\$ |# |>>> |\.\.\. '
copybutton_prompt_is_regexp = True


def _mathml(node, **where):
    # Brackets grow by themselves; docutils knows no commands for it.
    text = re.sub(r'\\[bB]ig(?![a-z])', '', node.astext())
    return tex2mathml(text, **where)


def _inline_equation(self, node):
    self.body.append(_mathml(node))
    raise SkipNode


def _equation(self, node):
    equation = _mathml(node, as_block=True)
    self.body.append(f'<div class="equation">{equation}</div>')
    raise SkipNode


def setup(app):
    app.add_html_math_renderer(
        'mathml', (_inline_equation, None), (_equation, None))
