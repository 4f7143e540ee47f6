"""Quality of clips: prompts and judges of the embedded models' worlds, CLIP score, McNemar's test."""
