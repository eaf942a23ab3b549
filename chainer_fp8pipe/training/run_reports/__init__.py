"""A run is recorded, on all ranks, for its report."""
