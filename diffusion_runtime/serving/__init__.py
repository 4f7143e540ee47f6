"""HTTP server: requests become jobs in a table on disk, which engines, processes of their own, turn into files.

The HTTP process (`server`, `app`) imports no torch. An engine (`engine`) loads the model once, and is spoken to by
lines of JSON. There may be several (`replicas`), as processes of this machine (`engine_process`) or on a cluster
(`on_ray`).
"""
