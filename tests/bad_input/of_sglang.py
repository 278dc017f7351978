"""SGLang's own settings, its parser of tool calls, and what both would do to the engines' weights."""

from case import Case


def wrong(name: str, value: str, *says: str, more: tuple[str, ...] = ()) -> Case:
    """A setting of `rollout.sglang` with a value that is refused; two ranks where it is about more than one."""
    return Case(f"{name}={value}", (f"rollout.sglang.{name}", *says), (f"rollout.sglang.{name}={value}", *more))


TWO = ("parallel.world_size=2", "rollout.tp=2")

TYPES = [
    wrong("max_total_tokens", "lots", "whole number", "lots"),
    wrong("max_total_tokens", "1.5", "whole number"),
    wrong("max_total_tokens", "[1, 2]", "whole number"),
    wrong("max_total_tokens", "{a: 1}", "whole number"),
    wrong("max_total_tokens", "true", "whole number"),
    wrong("max_total_tokens", ".nan"),
    wrong("max_total_tokens", ".inf"),
    wrong("max_total_tokens", "-1", "negative"),
    wrong("max_total_tokens", "0", "above 0"),
    wrong("max_total_tokens", "9" * 30, "at most"),
    wrong("max_total_tokens", "9" * 4000, "at most"),
    wrong("mem_fraction_static", "much", "number"),
    wrong("mem_fraction_static", ".nan"),
    wrong("mem_fraction_static", "1.5", "between 0 and 1"),
    wrong("mem_fraction_static", "-0.1", "between 0 and 1"),
    wrong("mem_fraction_static", "0", "between 0 and 1"),
    wrong("schedule_conservativeness", ".inf", "a number, not inf"),
    wrong("page_size", "0", "above 0"),
    wrong("page_size", "-16", "negative"),
    wrong("chunked_prefill_size", "0", "-1"),
    wrong("chunked_prefill_size", "-5", "negative"),
    wrong("chunked_prefill_size", "half", "whole number"),
    wrong("max_running_requests", "0", "above 0"),
    wrong("max_running_requests", "many", "whole number"),
    wrong("max_prefill_tokens", "-1", "negative"),
    wrong("disable_radix_cache", "maybe", "true or false"),
    wrong("disable_radix_cache", "2", "true or false"),
    wrong("enable_metrics", "[true]", "true or false"),
    wrong("cuda_graph_bs_decode", "[1, two]", "list"),
    wrong("cuda_graph_bs_decode", "8", "list"),
    wrong("extra_metric_labels", "[a]", "mapping"),
    wrong("nccl_port", "99999", "65535"),
    wrong("context_length", "long", "whole number"),
    wrong("context_length", "10", "rollout.max_context=192"),
    wrong("log_level", "3", "text"),
    wrong("served_model_name", "[a, b]", "text"),
    wrong("custom_sigquit_handler", "print", "cannot be set"),
    wrong("forward_hooks", "hook", "list"),
]

CHOICES = [
    wrong("attention_backend", "flashh", "one of", "did you mean"),
    wrong("attention_backend", "3", "one of"),
    wrong("attention_backend", "[triton]", "one of"),
    wrong("sampling_backend", "torch", "one of"),
    wrong("grammar_backend", "bnf", "one of"),
    wrong("schedule_policy", "fifo", "one of"),
    wrong("kv_cache_dtype", "fp4", "one of"),
    wrong("load_format", "zip", "one of"),
    wrong("deepep_mode", "fast", "one of"),
    wrong("moe_a2a_backend", "nccl", "one of"),
    wrong("moe_runner_backend", "tritonn", "one of", "did you mean triton?"),
    wrong("quantization", "int3", "one of"),
    wrong("reasoning_parser", "qwen4", "one of"),
    wrong("log_requests_level", "7", "one of"),
    wrong("lora_backend", "fast", "one of"),
]

NAMES = [
    wrong("atention_backend", "triton", "is not a field", "did you mean attention_backend?"),
    wrong("mem_fraction", "0.5", "did you mean mem_fraction_static?"),
    wrong("_speculative_draft_quantization_explicitly_set", "true", "is not a field"),
    wrong("tp_size", "2", "rollout.tp"),
    wrong("ep_size", "2", "rollout.ep"),
    wrong("device", "cuda", "it follows from the machine"),
    wrong("model_path", "/m", "model.path"),
    wrong("tokenizer_path", "/m", "model.path"),
    wrong("dtype", "float16", "model.dtype"),
    wrong("port", "80", "a free port"),
    wrong("enable_memory_saver", "false", "sleep"),
    wrong("tool_call_parser", "qwen25", "rollout.tool_call_parser"),
    wrong("preferred_sampling_params", "{top_k: 1}", "rollout.temperature"),
    wrong("weight_version", "7", "the trainer counts"),
]

WEIGHTS = [
    wrong("moe_runner_backend", "flashinfer_cutlass", "triton, deep_gemm"),
    wrong("moe_runner_backend", "flashinfer_trtllm", "triton, deep_gemm"),
    wrong("moe_runner_backend", "auto", "triton, deep_gemm"),
    wrong("moe_runner_backend", "marlin", "triton, deep_gemm"),
    wrong("init_expert_location", "/experts.json", "at their index"),
    wrong("enable_eplb", "true", "move"),
    wrong("ep_num_redundant_experts", "2", "move"),
    wrong("pp_size", "2", "pipeline"),
    wrong("quantization", "fp8", "quantization_config"),
    wrong("load_format", "dummy", "safetensors"),
    wrong("cpu_offload_gb", "4", "rollout.tp"),
    wrong("enable_lora", "true", "lora.rank"),
    wrong("delete_ckpt_after_loading", "true", "model.path"),
    wrong("json_model_override_args", "'{\"num_hidden_layers\": 1}'", "config.json"),
    wrong("moe_dense_tp_size", "3", "rollout.tp=2", more=TWO),
    wrong("moe_a2a_backend", "deepep", "rollout.ep to rollout.tp=2", more=TWO),
    wrong("dp_size", "2", "attn_dp_size", more=TWO),
]

HERE = [
    wrong("attention_backend", "fa3", "needs a GPU", "torch_native"),
    wrong("sampling_backend", "flashinfer", "needs a GPU", "pytorch"),
    wrong("disable_overlap_schedule", "false", "needs a GPU"),
    wrong("enable_torch_compile", "true", "needs a GPU"),
    wrong("enable_deterministic_inference", "true", "needs a GPU"),
    wrong("kv_cache_dtype", "fp8_e4m3", "needs a GPU"),
    wrong("moe_a2a_backend", "deepep", "needs a GPU"),
]

CASES = [
    *TYPES,
    *CHOICES,
    *NAMES,
    *WEIGHTS,
    *[Case(f"{case.name} on a CPU", case.says, case.given) for case in HERE],
    Case("pages that do not fit a chunk", ("chunked_prefill_size=100", "page_size=16"), (
        "rollout.sglang={chunked_prefill_size: 100, page_size: 16}",
    )),
    Case("a cache smaller than a conversation", ("max_total_tokens=100", "rollout.max_context=192"), (
        "rollout.sglang.max_total_tokens=100",
    )),
    Case("no such parser", ("rollout.tool_call_parser=qwen26", "qwen25"), ("rollout.tool_call_parser=qwen26",)),
    Case("a parser by its class", ("rollout.tool_call_parser",), ("rollout.tool_call_parser=Qwen25Detector",)),
    Case("sglang is a list", ("rollout.sglang", "mapping"), ("rollout.sglang=[a]",)),
]  # fmt: skip
