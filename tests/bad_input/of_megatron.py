"""Megatron fields of `model.megatron` and `train.ddp`."""

from case import Case


def megatron_case(name: str, value: str, *expected: str) -> Case:
    return Case(f"{name}={value}", (f"model.megatron.{name}", *expected), (f"model.megatron.{name}={value}",))


def ddp_case(name: str, value: str, *expected: str) -> Case:
    return Case(f"ddp {name}={value}", (f"train.ddp.{name}", *expected), (f"train.ddp.{name}={value}",))


CASES = [
    megatron_case("moe_z_loss_coeff", "much", "number"),
    megatron_case("moe_z_loss_coeff", ".nan"),
    megatron_case("moe_z_loss_coeff", ".inf"),
    megatron_case("moe_z_loss_coeff", "-0.1", "negative"),
    megatron_case("moe_z_loss_coeff", "[0.1]", "number"),
    megatron_case("moe_z_loss_coef", "0.1", "did you mean moe_z_loss_coeff?"),
    megatron_case("moe_aux_loss_coeff", "[0.1, x]", "number"),
    megatron_case("attention_dropout", "1.5", "below 1"),
    megatron_case("attention_dropout", "-0.1", "at least 0"),
    megatron_case("hidden_dropout", "often", "number"),
    megatron_case("hidden_dropout", ".nan"),
    megatron_case("recompute_num_layers", "one", "whole number"),
    megatron_case("recompute_num_layers", "1.5", "whole number"),
    megatron_case("recompute_num_layers", "-1", "negative"),
    megatron_case("recompute_num_layers", "9" * 30, "at most"),
    megatron_case("recompute_num_layers", "9" * 4000, "at most"),
    megatron_case("recompute_granularity", "ful", "full", "selective"),
    megatron_case("recompute_granularity", "full", "recompute_method"),
    megatron_case("recompute_method", "even", "uniform", "block"),
    megatron_case("recompute_modules", "mlp", "list"),
    megatron_case("recompute_modules", "[mpl]", "did you mean mlp?"),
    megatron_case("recompute_modules", "[3]", "text"),
    megatron_case("moe_token_dispatcher_type", "all2all", "alltoall"),
    megatron_case("moe_router_load_balancing_type", "{a: 1}", "text"),
    megatron_case("apply_rope_fusion", "maybe", "true or false"),
    megatron_case("apply_rope_fusion", "1", "true or false"),
    megatron_case("moe_permute_fusion", "[true]", "true or false"),
    megatron_case("init_method", "normal", "cannot be set"),
    megatron_case("activation_func", "gelu", "cannot be set"),
    megatron_case("params_dtype", "float16", "model.dtype"),
    megatron_case("autocast_dtype", "float16", "cannot be set"),
    megatron_case("attention_backend", "flash", "cannot be set"),
    megatron_case("cross_entropy_fusion_impl", "fast", "native"),
    megatron_case("cuda_graph_impl", "maybe", "none"),
    megatron_case("tensor_model_parallel_size", "2", "parallel.tp"),
    megatron_case("fp16", "true", "not implemented"),
    megatron_case("sequence_parallel", "true", "parallel.tp"),
    megatron_case("window_size", "[8, 0]", "config.json"),
    megatron_case("tp_comm_overlap", "fast", "true or false"),
    megatron_case("cpu_offloading_num_layers", "-2", "negative"),
    ddp_case("bucket_size", "big", "whole number"),
    ddp_case("bucket_size", "-1", "negative"),
    ddp_case("bucket_size", "0", "above 0"),
    ddp_case("bucket_size", "1.5", "whole number"),
    ddp_case("bucket_size", ".nan"),
    ddp_case("bucket_size", "9" * 30, "at most"),
    ddp_case("overlap_grad_reduce", "maybe", "true or false"),
    ddp_case("overlap_grad_reduce", "3", "true or false"),
    ddp_case("overlap_gradreduce", "true", "did you mean overlap_grad_reduce?"),
    ddp_case("use_distributed_optimizer", "false", "always on"),
    ddp_case("data_parallel_sharding_strategy", "3", "train.fsdp shards weights"),
    ddp_case("num_distributed_optimizer_instances", "two", "whole number"),
    Case("megatron is a list", ("model.megatron", "mapping"), ("model.megatron=[a]",)),
    Case("ddp is a number", ("train.ddp", "mapping"), ("train.ddp=3",)),
]
