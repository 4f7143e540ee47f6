"""Which chunks of keys each query selects by their mean keys: as row masks, in one pass over all heads."""
