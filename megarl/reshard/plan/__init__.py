"""The pure half of the reshard: layouts, what moves where, in which rounds, and at what cost."""
