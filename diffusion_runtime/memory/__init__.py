"""Memory: how the CPU allocator is set up, and what to say when there is not enough."""
