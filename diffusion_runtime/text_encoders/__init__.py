"""Text encoders: from prompts to the conditions a transformer attends to."""
