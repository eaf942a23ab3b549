"""Times of calls in training."""
