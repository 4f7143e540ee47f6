"""What a model says about requests."""
