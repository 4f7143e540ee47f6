"""Memory: allocator settings for the CPU, and out-of-memory errors with advice."""
