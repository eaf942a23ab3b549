"""An attribute is replaced while there are users, and then as before."""
import contextlib
import copy
import importlib
import inspect
import pkgutil
import re
import types

from chainer_fp8pipe import intercept
from chainer_fp8pipe.intercept import training_objects
from chainer_fp8pipe.intercept.patching import AroundCalls, Patch

import pytest


def fresh():
    """A class with a method, and a subclass that inherits the method."""
    class Owner:
        def method(self, value=0, **options):
            """What the method does."""
            return ['original', value, *options]

    class Child(Owner):
        pass
    return Owner, Child


def tenfold(original, self, value=0, **options):
    return ['ours', *original(self, 10 * value, **options)]


def foreign(owner, name='method'):
    """Another package's patch; returns what takes that off."""
    before = getattr(owner, name)

    def method(self, *args, **kwargs):
        return ['foreign', *before(self, *args, **kwargs)]
    setattr(owner, name, method)
    return lambda: setattr(owner, name, before)


def test_the_replacement_stands_while_there_are_users():
    owner, child = fresh()
    original = vars(owner)['method']
    patch = Patch(owner, 'method', tenfold)
    assert owner.method is original
    patch.__enter__()
    patch.__enter__()
    assert child().method(2, more=1) == ['ours', 'original', 20, 'more']
    assert owner.method.__name__ == 'method'
    assert owner.method.__doc__ == 'What the method does.'
    patch.__exit__()
    assert child().method(2) == ['ours', 'original', 20]
    patch.__exit__()
    assert vars(owner)['method'] is original
    assert child().method(2) == ['original', 2]
    with pytest.raises(KeyError), patch:
        raise KeyError
    assert owner.method is original


def test_an_attribute_may_be_inherited_or_no_function():
    _, child = fresh()
    with Patch(child, 'method', tenfold):
        assert child().method(1) == ['ours', 'original', 10]
    assert 'method' not in vars(child)
    assert child().method(1) == ['original', 1]
    module = types.ModuleType('module')
    module.part = part = types.SimpleNamespace(value=1)
    with Patch(module, 'part', lambda original: types.SimpleNamespace(
            value=original.value + 1)):
        assert module.part.value == 2
    assert module.part is part


@pytest.mark.parametrize('before', [False, True])
def test_a_foreign_patch_is_called_and_stays(before):
    """And there is one of ours at most below it."""
    owner, _ = fresh()
    patch = Patch(owner, 'method', tenfold)
    if before:
        foreign(owner)
    with patch:
        if not before:
            foreign(owner)
        ours = ['ours', 'foreign'] if before else ['foreign', 'ours']
        assert owner().method(1) == [*ours, 'original', 10]
    assert owner().method(1) == ['foreign', 'original', 1]
    theirs = owner.method
    for _ in range(3):
        with patch:
            assert owner().method(1) == ['ours', 'foreign', 'original', 10]
        assert owner.method is theirs


def test_nothing_is_left_of_several_in_whatever_order_they_end():
    owner, child = fresh()
    method, patches = owner.method, [
        Patch(child, 'method', tenfold) for _ in range(3)]
    for patch in patches:
        patch.__enter__()
    for number in 1, 0, 2:
        patches[number].__exit__()
    assert 'method' not in vars(child)
    assert child.method is method


def replaced():
    """Modules that replace something, and owner and name of what."""
    for found in pkgutil.iter_modules(intercept.__path__):
        module = importlib.import_module(f'{intercept.__name__}.{found.name}')
        for value in vars(module).values():
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, Patch):
                    yield module, one._owner, one._name
    for owner, name, _ in training_objects._REPLACED:
        yield training_objects, owner, name


@pytest.mark.parametrize(('module', 'owner', 'name'), [
    pytest.param(*one, id=f'{one[1].__name__}.{one[2]}')
    for one in replaced()])
def test_the_module_gives_the_line_of_what_it_replaces(module, owner, name):
    original = inspect.unwrap(getattr(owner, name))
    if inspect.ismodule(original):
        line = inspect.getsource(owner).partition(
            f'\nfrom chainer import {name}\n')[0].count('\n') + 2
    else:
        line = inspect.getsourcelines(original)[1]
    said = '\n'.join([module.__doc__, *re.findall(
        r'(?:#|line ).*', inspect.getsource(module))]).replace(
            'Chainer 7.8.1', '')
    assert str(line) in re.findall(r'\b\d+\b', said)


class User:
    """Holds a patch."""


def test_a_patch_is_held_as_long_as_its_holders_live():
    owner, _ = fresh()
    original = owner.method
    patch = Patch(owner, 'method', tenfold)
    users = [User(), User(), User()]
    ends = [patch.hold(user) for user in users]
    held = owner.method
    ends[1]()                   # earlier, and once only
    del users[0], users[0]
    with patch:
        assert owner.method is held is not original
    assert owner.method is held
    users.clear()
    assert owner.method is original


class Iterator:
    def next(self, value):
        return value + 1


class Inheriting(Iterator):
    pass


@pytest.fixture
def seen():
    return []


@pytest.fixture
def around(seen):
    @contextlib.contextmanager
    def block():
        seen.append('begin')
        try:
            yield
        finally:
            seen.append('end')
    return block


@pytest.mark.parametrize('kind', [Iterator, Inheriting])
def test_calls_of_the_object_alone_are_in_the_block(kind, seen, around):
    calls, one, before = AroundCalls(), kind(), kind.next
    calls.add(one, 'next', around)
    assert one.next(4) == 5
    assert kind().next(1) == copy.copy(one).next(1) == 2
    with pytest.raises(TypeError):
        one.next('text')
    assert seen == ['begin', 'end'] * 2
    calls.close()
    assert kind.next is before
    assert ('next' in vars(kind)) == (kind is Iterator)
    assert one.next(4) == 5
    assert len(seen) == 4
