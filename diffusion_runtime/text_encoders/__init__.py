"""From prompts to the conditions a transformer attends to."""
