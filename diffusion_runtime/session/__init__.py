"""Running requests together: several processes in step, batches, failures, interruptions, and what is made already."""
