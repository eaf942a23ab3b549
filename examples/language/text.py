"""A text that every machine has, as numbers: Python's standard library.

A character is a byte here, which nearly all of those sources agree with.
"""
import hashlib
import heapq
import os
import re
import sysconfig
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy

#: What is no text for humans, differs between machines, or is repeated.
SKIPPED = {'test', 'tests', 'idlelib', 'lib2to3', 'encodings', 'pydoc_data',
           'site-packages', 'dist-packages', 'ensurepip', '__pycache__'}

#: Of this much of the training text byte pairs are learned.
_LEARNED_FROM = 500_000

# A line break with the next line's indentation, a word with the blank before
# it, blanks, signs: no pair reaches from one such piece into the next.
_PIECE = re.compile(rb'\n *| ?\w+| +|\s| ?[^\s\w]+')


class Text(NamedTuple):
    """A text for training and another one for validation.

    Attributes:
        digest: Of the characters; other texts have others.
        alphabet: What the tokens mean.
        training: int32 array of tokens.
        validation: The same of other files.
    """

    digest: str
    alphabet: 'Alphabet'
    training: numpy.ndarray
    validation: numpy.ndarray


def prepare(characters, vocabulary, cache=None):
    """The standard library as tokens.

    Args:
        characters: How many there are at most, a tenth of them for
            validation.
        vocabulary: How many tokens there are at most; 0: one for each byte.
        cache: A file of :func:`save`, used if it is of the same text.

    Raises:
        ValueError: There are no sources on this machine.
    """
    parts = read(characters)
    digest = hashlib.blake2b(b'\0'.join(parts)).hexdigest()
    if cache and os.path.exists(cache):
        with numpy.load(cache) as saved:
            if (saved['digest'], saved['vocabulary']) == (digest, vocabulary):
                return Text(digest, Alphabet(saved['pairs'].tolist()),
                            saved['training'], saved['validation'])
    alphabet = (Alphabet.learned(parts[0][:_LEARNED_FROM], vocabulary)
                if vocabulary else Alphabet())
    return Text(digest, alphabet, *map(alphabet.encode, parts))


def save(text, vocabulary, path):
    """Writes what :func:`prepare` returned to a file, whole or not at all."""
    with open(f'{path}.partial', 'wb') as file:
        numpy.savez_compressed(
            file, digest=text.digest, vocabulary=vocabulary,
            pairs=numpy.array(text.alphabet.pairs, int).reshape(-1, 2),
            training=text.training, validation=text.validation)
    os.replace(file.name, path)


def read(characters, root=None):
    """Bytes for training and, of other files, for validation.

    Which files these are, and in what order they come, depends on their
    names alone.

    Args:
        characters: How many there are at most, a tenth of them for
            validation.
        root: The folder of the sources; default: the standard library.

    Raises:
        ValueError: There are no sources.
    """
    root = root or sysconfig.get_path('stdlib')
    sides = [], []
    for name in sorted(_sources(root), key=_number):
        sides[_number(name) % 10 == 0].append(os.path.join(root, name))
    parts = [_read_files(paths, size) for paths, size in zip(
        sides, (characters - characters // 10, characters // 10),
        strict=True)]
    if not all(parts):
        raise ValueError(f'{characters} characters of the Python sources in '
                         f'{root} do not make two texts')
    return parts


def _sources(root):
    """The names of all files, the same on all systems."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED
                      and not name.startswith('config-')]
        for file in files:
            if file.endswith('.py') and not file.startswith('_sysconfigdata'):
                path = os.path.relpath(os.path.join(folder, file), root)
                yield path.replace(os.sep, '/')


def _number(name):
    """A large number that depends on the name, but not on the machine."""
    return int.from_bytes(hashlib.blake2b(name.encode()).digest(), 'big')


def _read_files(paths, size):
    parts, left = [], size
    for path in paths:
        if left <= 0:
            break
        with open(path, 'rb') as file:
            parts.append(file.read()[:left])
        left -= len(parts[-1])
    return b''.join(parts)


class Alphabet:
    """Tokens: all bytes, and pairs of earlier tokens.

    Byte pair encoding (Sennrich, Haddow, Birch 2016) of bytes.  Inside, a
    token is a Unicode character, so that strings of them can be searched.

    Args:
        pairs: The two tokens that each further token stands for.

    Attributes:
        pairs: As given.
        words: The bytes of each token.
    """

    def __init__(self, pairs=()):
        self.pairs = [tuple(pair) for pair in pairs]
        self.words = [bytes([byte]) for byte in range(256)]
        for left, right in self.pairs:
            self.words.append(self.words[left] + self.words[right])
        self._tokens = {chr(left) + chr(right): chr(256 + number)
                        for number, (left, right) in enumerate(self.pairs)}

    @classmethod
    def learned(cls, text, size):
        """At most ``size`` tokens, made of the commonest pairs of a text."""
        counts = Counter(_PIECE.findall(text))
        return cls(_commonest_pairs(
            [piece.decode('latin-1') for piece in counts],
            list(counts.values()), size - 256))

    def __len__(self):
        return len(self.words)

    def encode(self, text):
        """The tokens of some bytes, int32 array."""
        pieces = _PIECE.findall(text)
        tokens = {piece: self._encode_piece(piece) for piece in set(pieces)}
        whole = ''.join(tokens[piece] for piece in pieces)
        return numpy.frombuffer(whole.encode('utf-32-le', 'surrogatepass'),
                                '<u4').astype(numpy.int32)

    def decode(self, tokens):
        """The bytes of some tokens."""
        return b''.join(self.words[token] for token in tokens)

    def _encode_piece(self, piece):
        """Its pairs become tokens in the order in which they were learned."""
        tokens = piece.decode('latin-1')
        while True:
            token, pair = min(
                ((self._tokens[pair], pair) for pair in _pairs(tokens)
                 if pair in self._tokens), default=(None, None))
            if token is None:
                return tokens
            tokens = tokens.replace(pair, token)


def _commonest_pairs(pieces, counts, number):
    """The pairs that become tokens, one after the other.

    Args:
        pieces: The tokens of each piece of a text; changed.
        counts: How often each is there.
        number: How many pairs there are at most; fewer if none comes twice.
    """
    totals, places = Counter(), defaultdict(set)
    for place, piece in enumerate(pieces):
        for pair in _pairs(piece):
            totals[pair] += counts[place]
            places[pair].add(place)
    # An entry counts as long as its total is that of now.
    heap = [(-total, pair) for pair, total in totals.items()]
    heapq.heapify(heap)
    found = []
    while heap and len(found) < number:
        negative, pair = heapq.heappop(heap)
        if negative > -2:
            break
        if totals[pair] != -negative:
            continue
        token, changed = chr(256 + len(found)), set()
        for place in places.pop(pair):
            count, old = counts[place], _pairs(pieces[place])
            pieces[place] = pieces[place].replace(pair, token)
            new = _pairs(pieces[place])
            for other in old:
                totals[other] -= count
            for other in new:
                totals[other] += count
                places[other].add(place)
            changed.update(old, new)
        for other in changed:
            heapq.heappush(heap, (-totals[other], other))
        found.append(tuple(map(ord, pair)))
    return found


def _pairs(tokens):
    return [tokens[start:start + 2] for start in range(len(tokens) - 1)]


class Windows:
    """A data set of pieces of a text: tokens, and those that follow them.

    Args:
        tokens: Of the whole text.
        length: Of a piece, in tokens.
        most: How many pieces there are at most; None: all.
    """

    def __init__(self, tokens, length, most=None):
        self._tokens, self._length = tokens, length
        self._count = max(0, len(tokens) - 1) // length
        if most is not None:
            self._count = min(self._count, most)

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        start = range(self._count)[index] * self._length
        end = start + self._length
        return self._tokens[start:end], self._tokens[start + 1:end + 1]
