"""Records of the communication of a job's ranks, checked for hangs, and peaks of memory without an allocator."""
