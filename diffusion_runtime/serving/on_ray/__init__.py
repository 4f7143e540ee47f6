"""Engines on a Ray cluster: one Serve deployment, whose replicas are gangs of processes in a placement group.

The one place that imports ray. What goes through it are texts of JSON and the bytes of files, never objects that a
request made.
"""
