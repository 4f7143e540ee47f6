"""The command line: one file per verb; flags and files in, API calls out."""
