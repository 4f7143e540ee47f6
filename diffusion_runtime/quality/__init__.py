"""Quality of clips: prompt accuracy of the embedded model's world, CLIP score, McNemar's test."""
