"""The mean of a model's gradients over all ranks: buckets and their queue."""
