"""Sessions: coordinator and rank runner of several processes, batch runner, failures, interruptions, resume."""
