"""The running half of the reshard: transport, packing kernels, quantisation and verification."""
