"""The settings of the tests themselves."""
from hypothesis import given, settings
from hypothesis import strategies as st


def examples():
    """What a property-based test tries."""
    tried = []

    @settings(max_examples=20)
    @given(st.floats())
    def trying(number):
        tried.append(number.hex())
    trying()
    return tried


def test_property_based_tests_try_the_same_examples_each_time():
    assert examples() == examples()
