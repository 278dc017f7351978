"""What a model family has to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.models.layout import Param

HFConfig = Mapping[str, Any]  # config.json as plain values


@dataclass(frozen=True)
class Family:
    """One table. Every function raises ConfigError for an option it does not implement, naming the option."""

    architecture: str
    """First entry of `architectures` in config.json."""
    model_type: str
    """`model_type` in config.json."""
    megatron_config: Callable[[HFConfig], dict[str, Any]]
    """Keyword arguments of TransformerConfig, or of MLATransformerConfig where they have `multi_latent_attention`.
    What the model computes and nothing else: no parallel sizes, types or fusions."""
    gpt_kwargs: Callable[[HFConfig], dict[str, Any]]
    """Keyword arguments of GPTModel; `vocab_size` is HF's, see `layout.padded_vocab`."""
    params: Callable[[HFConfig, int], list[Param]]
    """Every parameter of the whole model, layer by layer, checked to divide by this tensor parallel size."""
    tool_call_parser: str
    """SGLang's parser for the calls that these models write."""
    untrained: Callable[[HFConfig], tuple[str, ...]] = lambda hf: ()
    """Prefixes of HF tensors that are not trained: ignored on load, taken over unchanged on export."""
