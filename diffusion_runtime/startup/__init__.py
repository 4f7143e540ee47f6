"""What is done for the first seconds of a process."""
