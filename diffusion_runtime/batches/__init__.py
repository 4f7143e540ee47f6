"""Offline batch inference (`batch`): a file of rows, each a request, into a folder of results with a manifest."""
