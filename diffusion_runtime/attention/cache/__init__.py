"""Key-value cache of causal video: which frames are in sight, where their keys lie, and what all layers share."""
