"""Step caching: steps of a generation that are reused instead of computed, as wrappers of the prediction."""
