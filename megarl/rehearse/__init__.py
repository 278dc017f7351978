"""Play a job of any size on one machine: its program on tensors without bytes, and its communication as a record."""
