"""Where a model is cut."""
