"""A causal model's video while it is made."""
