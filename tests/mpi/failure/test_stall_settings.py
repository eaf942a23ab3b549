from chainer_fp8pipe.mpi.failure.stall_settings import (
    ACTION,
    SECONDS,
    StallSettings,
    settings_of_environment,
)

import pytest


@pytest.mark.parametrize(('given', 'settings'), [
    ({}, StallSettings()),
    ({SECONDS: ''}, StallSettings()),
    ({SECONDS: '0'}, StallSettings(0.0)),
    ({SECONDS: ' 2.5 ', ACTION: 'warn'}, StallSettings(2.5, ends=False)),
    ({ACTION: 'end'}, StallSettings()),
])
def test_settings_are_those_of_the_environment(monkeypatch, given, settings):
    monkeypatch.delenv(SECONDS, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert settings_of_environment() == settings


@pytest.mark.parametrize(('name', 'value'), [
    (SECONDS, 'soon'), (SECONDS, '-1'), (SECONDS, 'nan'), (SECONDS, 'inf'),
    (ACTION, 'restart')])
def test_a_value_that_is_not_allowed_is_an_error_that_names_it(
        monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f'{name} must be .*{value}'):
        settings_of_environment()


def test_the_limit_is_20_updates_and_30_seconds_at_least():
    assert StallSettings().limit(0.1) == 30
    assert StallSettings().limit(6.0) == 120
    assert StallSettings(7.0).limit(6.0) == 7


@pytest.mark.parametrize(('is_certain', 'is_broken', 'patience', 'ends'), [
    (True, True, 1, True), (True, False, 4, True), (False, True, 10, False),
    (False, False, 10, False)])
def test_what_may_be_over_some_day_is_waited_for(is_certain, is_broken,
                                                 patience, ends):
    settings = StallSettings()
    assert settings.patience(is_certain, is_broken) == patience
    assert settings.ends_if(is_certain) == ends


@pytest.mark.parametrize('is_certain', [True, False])
def test_seconds_that_were_given_hold_for_all(is_certain):
    assert StallSettings(5.0).patience(is_certain, False) == 1
    assert StallSettings(5.0).ends_if(is_certain)
    assert not StallSettings(5.0, ends=False).ends_if(is_certain)
