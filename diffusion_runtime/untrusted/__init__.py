"""Files and texts of strangers, read within limits: paths as regular files alone, JSON and YAML of bounded size."""
