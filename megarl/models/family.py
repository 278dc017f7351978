"""What a model family has to say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.models import blocks
from megarl.models.config_json import need
from megarl.models.layout_algebra import HFConfig, Param


@dataclass(frozen=True)
class Extras:
    """What a model computes that Megatron's configuration has no field for; `megatron/build.py` puts it in."""

    attention_cap: float = 0.0
    """Above 0: attention logits x, after scaling, become cap * tanh(x / cap)."""
    logit_cap: float = 0.0
    """The same for the logits of the vocabulary, before the temperature divides them."""
    embedding_scale: float = 1.0
    """Multiplies embeddings, in the model's type; the tied output layer is not scaled."""
    post_norms: bool = False
    """What attention and MLP add to the residual stream has a norm of its own."""
    has_group_max_routing: bool = False
    """Group-limited routing ranks a group of experts by its best one, not by a sum over several."""


NO_EXTRAS = Extras()
"""Of a model of which Megatron's configuration says all."""


@dataclass(frozen=True)
class Family:
    """One table. Every function raises ConfigError for an option it does not implement, naming the option."""

    architecture: str
    """First entry of `architectures` in config.json."""
    model_type: str
    """`model_type` in config.json."""
    check: Callable[[HFConfig], None]
    """Whether the config has options that are not implemented."""
    megatron_config: Callable[[HFConfig], dict[str, Any]]
    """Keyword arguments of TransformerConfig, or of MLATransformerConfig where they have `multi_latent_attention`.
    What the model computes and nothing else: no parallel sizes, types or fusions."""
    gpt_kwargs: Callable[[HFConfig], dict[str, Any]]
    """Keyword arguments of GPTModel; `vocab_size` is HF's, see `cuts.padded_vocab`."""
    layer: Callable[[HFConfig, int, Iterable[int]], list[Param]]
    """The table of a decoder layer with these of its routed experts. A layer past the last is one of multi-token
    prediction, as HF numbers them; where there are none of these, it is not asked for."""
    num_experts: Callable[[HFConfig], int]
    """Routed experts of a layer that has any; 0 for a dense model."""
    tool_call_parser: str
    """SGLang's parser for the calls that these models write."""
    parsers_by_type: Mapping[str, str] = field(default_factory=dict)
    """The same for models of this architecture that others have published, by their `model_type`."""
    extras: Callable[[HFConfig], Extras] = lambda hf: NO_EXTRAS
    """What `megatron_config` cannot say."""
    untrained_prefixes: Callable[[HFConfig], tuple[str, ...]] = lambda hf: ()
    """Prefixes of HF tensors that are not trained, or only if asked for: of layers of multi-token prediction."""
    num_mtp_layers: Callable[[HFConfig], int] = lambda hf: 0
    """How many layers of multi-token prediction follow the decoder's, and are in the table."""

    def parser(self, hf: HFConfig) -> str:
        """SGLang's parser for the calls that the model of this config.json writes."""
        return self.parsers_by_type.get(str(hf.get("model_type")), self.tool_call_parser)

    def params(self, hf: HFConfig, tp: int, etp: int = 1, mtp: bool = False) -> list[Param]:
        """Every trained parameter of the model, layer by layer, checked to divide by these tensor parallel sizes, of
        routed experts by `etp`, of the others by `tp`. mtp: with the layers of multi-token prediction."""
        self.check(hf)
        layers = range(need(hf, "num_hidden_layers") + (self.num_mtp_layers(hf) if mtp else 0))
        experts = range(self.num_experts(hf))
        rows = [row for layer in layers for row in self.layer(hf, layer, experts)]
        return blocks.check_divisible(blocks.embedding(hf) + rows + blocks.final_params(hf), tp, etp)
