"""Times of calls in training, and plans made again with them."""
