"""A small set in ImageNet's layout, to try everything with in minutes.

    python examples/imagenet/make_images.py ROOT

writes ROOT/train/CLASS/*.JPEG and ROOT/val/CLASS/*.JPEG: parts of
scikit-learn's two sample photographs, so nothing is fetched.  A class is one
photograph in one cast of colour.  Both sets show parts of the same
photographs: an accuracy says that training works, and no more.
"""
import argparse
import os
import pathlib
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), os.pardir,
                                os.pardir, 'benchmarks'))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('root', metavar='ROOT', type=pathlib.Path,
                        help='where to; a folder that does not exist yet')
    parser.add_argument('--train', type=int, default=400, metavar='N',
                        help='training images (default: 400)')
    parser.add_argument('--val', type=int, default=100, metavar='N',
                        help='validation images (default: 100)')
    parser.add_argument('--classes', type=int, default=10, metavar='N',
                        help='1 to 10 (default: 10)')
    parser.add_argument('--seed', type=int, default=0,
                        help='of all that is drawn (default: 0)')
    parser.add_argument('--scale', type=float, default=0.25,
                        help="of the sides; 1: as ImageNet's, of some 480 x "
                        '400 pixels (default: 0.25)')
    options = parser.parse_args()
    try:
        from photographs import build
    except ImportError as error:
        parser.error(f"{error}; install it: pip install '.[examples]', or "
                     'make images')
    if options.root.exists():
        parser.error(f'{options.root} exists already')
    for name in ('train', 'val'):
        if getattr(options, name) < options.classes:
            parser.error(f'--{name} {getattr(options, name)} leaves classes '
                         f'without images; there are {options.classes}')
    for number, name in enumerate(('train', 'val')):
        build(options.root / name, getattr(options, name), options.classes,
              2 * options.seed + number, options.scale)
    print(f'{options.train} training images and {options.val} validation '
          f'images of {options.classes} classes are in {options.root}')


if __name__ == '__main__':
    main()
