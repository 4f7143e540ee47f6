"""What a machine has, what of it works, and what to type where it does not: plain values for `doctor`."""
