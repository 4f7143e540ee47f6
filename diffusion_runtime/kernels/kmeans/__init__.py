"""Lloyd's k-means over many groups of points at once (batched k-means)."""
