"""Diagnosis of a machine for `doctor`: what is installed, what of it works, and the command that repairs the rest."""
