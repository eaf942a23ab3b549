"""What Chainer's Trainer sees of this package."""
