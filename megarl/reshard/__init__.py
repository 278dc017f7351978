"""The reshard: move the policy's weights from Megatron's shards straight into the engines' shards.

`plan/` is pure: layouts of both sides, what has to move, who sends it, in which rounds, and a lower bound on the bytes.
`run/` executes a plan: transport, packing and hash kernels, quantisation. `README.md` explains both.
"""
