"""Every shim that lets Megatron-Core and SGLang run on a machine without a GPU."""
