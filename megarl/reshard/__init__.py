"""Moving the policy's weights from Megatron's layout to where they are wanted: `gather.py`, full HF tensors everywhere.

May import `models`, `parallel` and Megatron's process groups; workers import it.
"""
