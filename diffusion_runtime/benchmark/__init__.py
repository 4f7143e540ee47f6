"""How fast attention is on this machine, at the shapes of real models."""
