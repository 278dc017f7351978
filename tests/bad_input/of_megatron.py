"""Megatron's own fields: of the model and of the gradient buffers."""

from case import Case


def wrong(name: str, value: str, *says: str) -> Case:
    return Case(f"{name}={value}", (f"model.megatron.{name}", *says), (f"model.megatron.{name}={value}",))


def ddp(name: str, value: str, *says: str) -> Case:
    return Case(f"ddp {name}={value}", (f"train.ddp.{name}", *says), (f"train.ddp.{name}={value}",))


CASES = [
    wrong("moe_z_loss_coeff", "much", "number"),
    wrong("moe_z_loss_coeff", ".nan"),
    wrong("moe_z_loss_coeff", ".inf"),
    wrong("moe_z_loss_coeff", "-0.1", "negative"),
    wrong("moe_z_loss_coeff", "[0.1]", "number"),
    wrong("moe_z_loss_coef", "0.1", "did you mean moe_z_loss_coeff?"),
    wrong("moe_aux_loss_coeff", "[0.1, x]", "number"),
    wrong("attention_dropout", "1.5", "below 1"),
    wrong("attention_dropout", "-0.1", "at least 0"),
    wrong("hidden_dropout", "often", "number"),
    wrong("hidden_dropout", ".nan"),
    wrong("recompute_num_layers", "one", "whole number"),
    wrong("recompute_num_layers", "1.5", "whole number"),
    wrong("recompute_num_layers", "-1", "negative"),
    wrong("recompute_num_layers", "9" * 30, "at most"),
    wrong("recompute_num_layers", "9" * 4000, "at most"),
    wrong("recompute_granularity", "ful", "full", "selective"),
    wrong("recompute_granularity", "full", "recompute_method"),
    wrong("recompute_method", "even", "uniform", "block"),
    wrong("recompute_modules", "mlp", "list"),
    wrong("recompute_modules", "[mpl]", "did you mean mlp?"),
    wrong("recompute_modules", "[3]", "text"),
    wrong("moe_token_dispatcher_type", "all2all", "alltoall"),
    wrong("moe_router_load_balancing_type", "{a: 1}", "text"),
    wrong("apply_rope_fusion", "maybe", "true or false"),
    wrong("apply_rope_fusion", "1", "true or false"),
    wrong("moe_permute_fusion", "[true]", "true or false"),
    wrong("init_method", "normal", "cannot be set"),
    wrong("activation_func", "gelu", "cannot be set"),
    wrong("params_dtype", "float16", "model.dtype"),
    wrong("autocast_dtype", "float16", "cannot be set"),
    wrong("attention_backend", "flash", "cannot be set"),
    wrong("cross_entropy_fusion_impl", "fast", "native"),
    wrong("cuda_graph_impl", "maybe", "none"),
    wrong("tensor_model_parallel_size", "2", "parallel.tp"),
    wrong("fp16", "true", "not implemented"),
    wrong("sequence_parallel", "true", "parallel.tp"),
    wrong("window_size", "[8, 0]", "config.json"),
    wrong("tp_comm_overlap", "fast", "true or false"),
    wrong("cpu_offloading_num_layers", "-2", "negative"),
    ddp("bucket_size", "big", "whole number"),
    ddp("bucket_size", "-1", "negative"),
    ddp("bucket_size", "0", "above 0"),
    ddp("bucket_size", "1.5", "whole number"),
    ddp("bucket_size", ".nan"),
    ddp("bucket_size", "9" * 30, "at most"),
    ddp("overlap_grad_reduce", "maybe", "true or false"),
    ddp("overlap_grad_reduce", "3", "true or false"),
    ddp("overlap_gradreduce", "true", "did you mean overlap_grad_reduce?"),
    ddp("use_distributed_optimizer", "false", "always on"),
    ddp("data_parallel_sharding_strategy", "3", "text"),
    ddp("num_distributed_optimizer_instances", "two", "whole number"),
    Case("megatron is a list", ("model.megatron", "mapping"), ("model.megatron=[a]",)),
    Case("ddp is a number", ("train.ddp", "mapping"), ("train.ddp=3",)),
]
