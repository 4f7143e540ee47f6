"""Rules of a model for requests: one file per topic, and combinations.py for pairs of features."""
