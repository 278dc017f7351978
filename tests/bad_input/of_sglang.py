"""SGLang settings: types, choices, names, tool call parsers, and settings that change weights."""

from case import Case


def sglang_case(name: str, value: str, *expected: str, overrides: tuple[str, ...] = ()) -> Case:
    """A case with an invalid value of `rollout.sglang.NAME`."""
    return Case(
        f"{name}={value}", (f"rollout.sglang.{name}", *expected), (f"rollout.sglang.{name}={value}", *overrides)
    )


TWO = ("parallel.world_size=2", "rollout.tp=2")

TYPES = [
    sglang_case("max_total_tokens", "lots", "whole number", "lots"),
    sglang_case("max_total_tokens", "1.5", "whole number"),
    sglang_case("max_total_tokens", "[1, 2]", "whole number"),
    sglang_case("max_total_tokens", "{a: 1}", "whole number"),
    sglang_case("max_total_tokens", "true", "whole number"),
    sglang_case("max_total_tokens", ".nan"),
    sglang_case("max_total_tokens", ".inf"),
    sglang_case("max_total_tokens", "-1", "negative"),
    sglang_case("max_total_tokens", "0", "above 0"),
    sglang_case("max_total_tokens", "9" * 30, "at most"),
    sglang_case("max_total_tokens", "9" * 4000, "at most"),
    sglang_case("mem_fraction_static", "much", "number"),
    sglang_case("mem_fraction_static", ".nan"),
    sglang_case("mem_fraction_static", "1.5", "between 0 and 1"),
    sglang_case("mem_fraction_static", "-0.1", "between 0 and 1"),
    sglang_case("mem_fraction_static", "0", "between 0 and 1"),
    sglang_case("schedule_conservativeness", ".inf", "a number, not inf"),
    sglang_case("page_size", "0", "above 0"),
    sglang_case("page_size", "-16", "negative"),
    sglang_case("chunked_prefill_size", "0", "-1"),
    sglang_case("chunked_prefill_size", "-5", "negative"),
    sglang_case("chunked_prefill_size", "half", "whole number"),
    sglang_case("max_running_requests", "0", "above 0"),
    sglang_case("max_running_requests", "many", "whole number"),
    sglang_case("max_prefill_tokens", "-1", "negative"),
    sglang_case("disable_radix_cache", "maybe", "true or false"),
    sglang_case("disable_radix_cache", "2", "true or false"),
    sglang_case("enable_metrics", "[true]", "true or false"),
    sglang_case("cuda_graph_bs_decode", "[1, two]", "list"),
    sglang_case("cuda_graph_bs_decode", "8", "list"),
    sglang_case("extra_metric_labels", "[a]", "mapping"),
    sglang_case("nccl_port", "99999", "65535"),
    sglang_case("context_length", "long", "whole number"),
    sglang_case("context_length", "10", "rollout.max_context=192"),
    sglang_case("log_level", "3", "text"),
    sglang_case("served_model_name", "[a, b]", "text"),
    sglang_case("custom_sigquit_handler", "print", "cannot be set"),
    sglang_case("forward_hooks", "hook", "list"),
]

CHOICES = [
    sglang_case("attention_backend", "flashh", "one of", "did you mean"),
    sglang_case("attention_backend", "3", "one of"),
    sglang_case("attention_backend", "[triton]", "one of"),
    sglang_case("sampling_backend", "torch", "one of"),
    sglang_case("grammar_backend", "bnf", "one of"),
    sglang_case("schedule_policy", "fifo", "one of"),
    sglang_case("kv_cache_dtype", "fp4", "one of"),
    sglang_case("load_format", "zip", "one of"),
    sglang_case("deepep_mode", "fast", "one of"),
    sglang_case("moe_a2a_backend", "nccl", "one of"),
    sglang_case("moe_runner_backend", "tritonn", "one of", "did you mean triton?"),
    sglang_case("quantization", "int3", "one of"),
    sglang_case("reasoning_parser", "qwen4", "one of"),
    sglang_case("log_requests_level", "7", "one of"),
    sglang_case("lora_backend", "fast", "one of"),
]

NAMES = [
    sglang_case("atention_backend", "triton", "is not a field", "did you mean attention_backend?"),
    sglang_case("mem_fraction", "0.5", "did you mean mem_fraction_static?"),
    sglang_case("_speculative_draft_quantization_explicitly_set", "true", "is not a field"),
    sglang_case("tp_size", "2", "rollout.tp"),
    sglang_case("ep_size", "2", "rollout.ep"),
    sglang_case("device", "cuda", "it follows from the machine"),
    sglang_case("model_path", "/m", "model.path"),
    sglang_case("tokenizer_path", "/m", "model.path"),
    sglang_case("dtype", "float16", "model.dtype"),
    sglang_case("port", "80", "a free port"),
    sglang_case("enable_memory_saver", "false", "sleep"),
    sglang_case("tool_call_parser", "qwen25", "rollout.tool_call_parser"),
    sglang_case("preferred_sampling_params", "{top_k: 1}", "rollout.temperature"),
    sglang_case("weight_version", "7", "the trainer counts"),
]

WEIGHTS = [
    sglang_case("moe_runner_backend", "flashinfer_cutlass", "triton, deep_gemm"),
    sglang_case("moe_runner_backend", "flashinfer_trtllm", "triton, deep_gemm"),
    sglang_case("moe_runner_backend", "auto", "triton, deep_gemm"),
    sglang_case("moe_runner_backend", "marlin", "triton, deep_gemm"),
    sglang_case("init_expert_location", "/experts.json", "at their index"),
    sglang_case("enable_eplb", "true", "rollout.rebalance_experts_every"),
    sglang_case("ep_num_redundant_experts", "2", "rollout.num_redundant_experts"),
    sglang_case("pp_size", "2", "pipeline"),
    sglang_case("quantization", "fp8", "quantization_config"),
    sglang_case("load_format", "dummy", "safetensors"),
    sglang_case("cpu_offload_gb", "4", "rollout.tp"),
    sglang_case("enable_lora", "true", "lora.rank"),
    sglang_case("delete_ckpt_after_loading", "true", "model.path"),
    sglang_case("json_model_override_args", "'{\"num_hidden_layers\": 1}'", "config.json"),
    sglang_case("moe_dense_tp_size", "3", "rollout.tp=2", overrides=TWO),
    sglang_case("moe_a2a_backend", "deepep", "rollout.ep to rollout.tp=2", overrides=TWO),
    sglang_case("dp_size", "2", "attn_dp_size", overrides=TWO),
]

RESERVED = [
    sglang_case("attention_backend", "fa3", "needs a GPU", "torch_native"),
    sglang_case("sampling_backend", "flashinfer", "needs a GPU", "pytorch"),
    sglang_case("disable_overlap_schedule", "false", "needs a GPU"),
    sglang_case("enable_torch_compile", "true", "needs a GPU"),
    sglang_case("enable_deterministic_inference", "true", "needs a GPU"),
    sglang_case("kv_cache_dtype", "fp8_e4m3", "needs a GPU"),
    sglang_case("moe_a2a_backend", "deepep", "needs a GPU"),
]

CASES = [
    *TYPES,
    *CHOICES,
    *NAMES,
    *WEIGHTS,
    *[Case(f"{case.name} on a CPU", case.expected, case.overrides) for case in RESERVED],
    Case("a page size that does not divide the chunk", ("chunked_prefill_size=100", "page_size=16"), (
        "rollout.sglang={chunked_prefill_size: 100, page_size: 16}",
    )),
    Case("a cache smaller than a conversation", ("max_total_tokens=100", "rollout.max_context=192"), (
        "rollout.sglang.max_total_tokens=100",
    )),
    Case("an unknown parser", ("rollout.tool_call_parser=qwen26", "qwen25"), ("rollout.tool_call_parser=qwen26",)),
    Case("a parser's class name", ("rollout.tool_call_parser",), ("rollout.tool_call_parser=Qwen25Detector",)),
    Case("sglang as a list", ("rollout.sglang", "mapping"), ("rollout.sglang=[a]",)),
]  # fmt: skip
