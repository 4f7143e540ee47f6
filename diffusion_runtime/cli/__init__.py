"""The command line: one file a verb; flags and files in, API calls out."""
