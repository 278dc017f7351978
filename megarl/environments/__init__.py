"""What a policy acts in: tools, stateful environments and agents, each in processes beside the rank."""
