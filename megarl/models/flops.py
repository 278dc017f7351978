"""Count floating point operations from a model's shapes, for model FLOPs utilisation (MFU).

Source: arXiv:2204.02311, appendix B. Only matrix products count, with 2 operations per multiply-add; norms,
activations, rotations and softmax are below 1 %. Recomputation and padding do not count. Causal attention counts the n
(n + 1) / 2 pairs of a sequence, or fewer with a sliding window. `quadratic_cost` gives the relative cost of a sequence
for load balancing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config import LoraConfig
from megarl.models.deepseek_sparse import indexer_types, is_indexer
from megarl.models.family import HFConfig
from megarl.models.lora_tables import adapted_weights
from megarl.models.registry import family_of, param_count, part_of


def active_params(hf: HFConfig) -> float:
    """Return the number of active weights per token: all but embedding and vision tower, and of experts the chosen."""
    counts = param_count(hf)
    inactive = ("embedding", "vision tower", "experts")
    active = float(sum(counts.values()) - sum(counts[part] for part in inactive)) + active_expert_params(hf)
    return active if counts["head"] else active + counts["embedding"]  # a tied head


def active_expert_params(hf: HFConfig) -> float:
    """Return the number of active weights per token in routed experts."""
    settings = family_of(hf).megatron_config(hf)
    experts = settings.get("num_moe_experts")
    return param_count(hf)["experts"] * settings["moe_router_topk"] / experts if experts else 0.0


def quadratic_cost(hf: HFConfig) -> float:
    """Return q such that n tokens cost n + q n^2 times as much as one token without attention.

    A token costs 2 operations per active weight. Causal attention has n^2 / 2 pairs per head and layer, which cost 2
    operations per element of a query and of a value. Sliding windows are ignored: Gemma 2's saves an eighth of the
    pairs of its longest sequences.
    """
    settings = family_of(hf).megatron_config(hf)
    if settings.get("dsa_indexer_topk"):  # attention to index_topk keys costs n; the scores of all keys cost n^2
        index_size = settings["dsa_indexer_n_heads"] * (settings["dsa_indexer_head_dim"] + 1)
        return float(indexer_types(hf).count("full") * index_size / (2 * active_params(hf)))
    layers = settings["num_layers"] - sum(settings.get("linear_attention_freq") or ())
    pairs = layers * settings["num_attention_heads"] * attention_width(settings)
    return float(pairs / (2 * active_params(hf)))


def attention_width(settings: Mapping[str, Any]) -> int:
    """Return the elements of a query plus a value of one head. settings: fields of Megatron's TransformerConfig."""
    if settings.get("multi_latent_attention"):
        return int(settings["qk_head_dim"] + settings["qk_pos_emb_head_dim"] + settings["v_head_dim"])
    return 2 * int(settings["kv_channels"])


def delta_net_flops(settings: Mapping[str, Any]) -> float:
    """Return the operations of gated delta nets per token without their projections, in a forward pass.

    A state of each value head is read for the value to write and for the output, and changed by an outer product. This
    is the recurrence; kernels compute chunks of tokens with more operations.
    """
    layers = sum(settings.get("linear_attention_freq") or ())
    if not layers:
        return 0.0
    keys, values = (int(settings[f"linear_{kind}_head_dim"]) for kind in ("key", "value"))
    key_heads, value_heads = (int(settings[f"linear_num_{kind}_heads"]) for kind in ("key", "value"))
    convolved = int(settings["linear_conv_kernel_dim"]) * (2 * key_heads * keys + value_heads * values)
    return 2.0 * layers * (3 * value_heads * keys * values + convolved)


PEAK_FLOPS: dict[str, float] = {
    "B300": 2250e12,  # HGX B300: 36 PFLOP/s of 8 with sparsity
    "GB300": 2500e12,  # GB300 NVL72: 360 PFLOP/s of 72 with sparsity
    "B200": 2250e12,  # HGX B200: 36 PFLOP/s of 8 with sparsity (Blackwell datasheet)
    "GB200": 2500e12,  # GB200 NVL72: 360 PFLOP/s of 72 with sparsity
    "H200": 989.4e12,  # SXM: 1,979 TFLOP/s with sparsity
    "H200 NVL": 835.5e12,  # 1,671 with sparsity
    "H100": 989.4e12,  # SXM5: Hopper whitepaper, dense
    "H100 PCIe": 756e12,  # 1,513 with sparsity
    "H100 NVL": 835.5e12,  # 1,671 with sparsity
    "H800": 989.4e12,  # SXM, same chip with slower links
    "H800 PCIe": 756e12,
    "H20": 148e12,
    "GH200": 989.4e12,  # 1,979 with sparsity
    "A100": 312e12,  # SXM4 and PCIe alike; 624 with sparsity
    "A800": 312e12,  # same chip with slower links
    "A40": 149.7e12,  # 299.4 with sparsity
    "A30": 165e12,  # 330 with sparsity
    "A10": 125e12,  # 250 with sparsity
    "L40S": 362.05e12,  # 733 with sparsity
    "L40": 181.05e12,  # 362.1 with sparsity
    "L20": 119.5e12,
    "L4": 121e12,  # 242 with sparsity
    "RTX 4090": 165.2e12,  # Ada whitepaper: with fp32 accumulation, as in training; 330.3 with fp16 accumulation
    "RTX 4090 D": 147.1e12,  # scaled by its 456 of 512 tensor cores
    "RTX 3090 Ti": 80e12,  # likewise, from Ampere's GA102 whitepaper
    "RTX 3090": 71e12,
}
"""Dense bf16 operations per second on tensor cores, by the words in CUDA's name of the GPU.

From quotations of NVIDIA's data sheets, which mostly give the value with 2:4 sparsity, twice the dense one. Those of
A100, H100, H200, B200 and L40S agree with torchtitan's table (torchtitan/tools/utils.py). FP8 training is measured
against bf16 too, so that runs are comparable.
"""


def peak_flops(gpu: str) -> float | None:
    """Return the peak of a GPU by its name, or None if the table does not have it."""
    words = gpu.replace("-", " ").split()
    matches = [name for name in PEAK_FLOPS if set(name.split()) <= set(words)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


@dataclass(frozen=True)
class Flops:
    """Floating point operations of a model."""

    forward_per_token: float  # without attention pairs and output layer
    backward_per_token: float  # gradients of activations and of trained weights
    head_forward: float  # of the output layer, per token with logits
    head_backward: float
    attention_per_pair: float  # of tokens, over all layers without a window
    windowed_per_pair: float = 0.0  # over all layers with a window
    window: int = 0  # number of keys that a query sees in these layers, including its own
    indexed_per_pair: float = 0.0  # of all pairs, for the scores from which sparse attention chooses; no backward pass

    def forward(self, lengths: Iterable[int], logits: int | None = None) -> float:
        """Return the operations of a forward pass. logits: the number of tokens with logits; all by default."""
        lengths = tuple(lengths)
        tokens, attention = self._count_tokens(lengths)
        attention += sum(self.indexed_per_pair * (length * (length + 1) / 2) for length in lengths)
        return tokens * self.forward_per_token + (tokens if logits is None else logits) * self.head_forward + attention

    def backward(self, lengths: Iterable[int], logits: int | None = None) -> float:
        """Return the operations of the backward pass. Attention needs gradients of both factors of its two products."""
        tokens, attention = self._count_tokens(lengths)
        head = (tokens if logits is None else logits) * self.head_backward
        return tokens * self.backward_per_token + head + 2 * attention

    def _count_tokens(self, lengths: Iterable[int]) -> tuple[int, float]:
        """Return the number of tokens, and the operations of attention in a forward pass."""
        tokens, attention = 0, 0.0
        for length in lengths:
            tokens += length
            windowed = self.windowed_per_pair * windowed_pairs(length, self.window)
            attention += self.attention_per_pair * (length * (length + 1) / 2) + windowed
        return tokens, attention


def windowed_pairs(length: int, window: int) -> float:
    """Return the number of pairs of a query and one of the last `window` keys, its own included."""
    capped = min(length, window)
    return capped * (capped + 1) / 2 + (length - capped) * capped


def model_flops(hf: HFConfig, lora: LoraConfig | None = None, has_scalar_head: bool = False) -> Flops:
    """Return the operations of the model in config.json, without multi-token prediction layers.

    Raises ConfigError as its family does.

    lora: set if only adapters are trained.
    has_scalar_head: whether it is a critic or reward model, whose head is a single row.
    """
    family = family_of(hf)
    settings, table = family.megatron_config(hf), family.params(hf, 1)
    experts = settings.get("num_moe_experts")
    expert_share = settings["moe_router_topk"] / experts if experts else 1.0  # fraction of tokens that use an expert
    base, indexers, adapters = 0.0, 0.0, 0.0
    for param in table:
        is_matrix = len(param.hf[0].shape) == 2 and not param.is_buffer
        if is_matrix and is_indexer(param):  # frozen, and their input needs no gradient
            indexers += 2 * param.size
        elif is_matrix and part_of(param) not in ("embedding", "vision tower", "head", "norms"):
            base += (expert_share if param.expert is not None else 1.0) * param.size
    base *= 2
    recurrence = delta_net_flops(settings)
    has_adapters = lora is not None and lora.rank > 0
    if lora is not None and has_adapters:
        counted = {param.megatron for param in table}
        # Targets may name layers of multi-token prediction alone.
        complete = family.params(hf, 1, mtp=family.num_mtp_layers(hf) > 0)
        for param in adapted_weights(complete, lora.target_modules):
            if param.megatron not in counted:
                continue
            rows, columns = sum(tensor.shape[0] for tensor in param.hf), param.hf[0].shape[1]
            adapters += 2 * (expert_share if param.expert is not None else 1.0) * lora.rank * (rows + columns)
    head = 2.0 * (1 if has_scalar_head else int(hf["vocab_size"])) * int(settings["hidden_size"])
    layers = int(settings["num_layers"]) - sum(settings.get("linear_attention_freq") or ())
    per_pair = 2.0 * int(settings["num_attention_heads"]) * attention_width(settings)
    window, pattern = settings.get("window_size"), settings.get("window_attn_skip_freq")
    windowed_layers = 0 if not window else sum(pattern) if isinstance(pattern, list) else layers
    index_size = 0
    if topk := settings.get("dsa_indexer_topk"):  # as many keys as in a window, wherever they are
        windowed_layers, window = layers, (int(topk) - 1, 0)
        index_size = int(settings["dsa_indexer_n_heads"]) * (int(settings["dsa_indexer_head_dim"]) + 1)
    return Flops(
        forward_per_token=base + indexers + recurrence + adapters,
        backward_per_token=(1 if has_adapters else 2) * base + 2 * (recurrence + adapters),
        head_forward=head,
        head_backward=(1 if has_adapters and not has_scalar_head else 2) * head,  # a critic's head is always trained
        attention_per_pair=(layers - windowed_layers) * per_pair,
        windowed_per_pair=windowed_layers * per_pair,
        window=int(window[0]) + 1 if window else 0,
        indexed_per_pair=2.0 * index_size * indexer_types(hf).count("full") if index_size else 0.0,
    )
