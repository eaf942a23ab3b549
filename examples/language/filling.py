"""How large a model may be."""


def most_layers(fits, least=1):
    """The largest number of layers that fits.

    Found by doubling and halving, as a model that is ``deferred`` costs next
    to nothing.

    Args:
        fits: Tells whether so many layers fit; if some do, fewer do.
        least: The smallest number to try.

    Raises:
        ValueError: Not even that one fits.
    """
    if not fits(least):
        raise ValueError(f'not even {least} layers fit; give the ranks more '
                         'memory, or take fewer --units')
    good, bad = least, 2 * least
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
