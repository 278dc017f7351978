"""Tools, stateful environments and agents, each in processes beside the ranks."""
