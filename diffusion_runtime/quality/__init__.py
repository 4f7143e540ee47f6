"""Quality of generated clips: metrics against a dense run, and the `shapes` data set with its programmatic checker."""
