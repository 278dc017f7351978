"""What a policy acts in: tools, environments with a state of their own, agents; each in processes beside the rank."""
