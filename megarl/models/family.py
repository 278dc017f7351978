"""The `Family` dataclass, everything that a model family defines; and the scalar head of critics and reward models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megarl.models import blocks
from megarl.models.config_json import need
from megarl.models.layout_algebra import HFConfig, HFTensor, Param, split_param
from megarl.models.rotary import ScaledRotary


@dataclass(frozen=True)
class Extras:
    """Model features without a field in Megatron's configuration; `megatron/build.py` adds them."""

    attention_cap: float = 0.0
    """Above 0: attention logits x, after scaling, become cap * tanh(x / cap)."""
    logit_cap: float = 0.0
    """The same for the logits of the vocabulary, before the temperature divides them."""
    embedding_scale: float = 1.0
    """Factor on embeddings, in the model's dtype. A tied output layer is not scaled."""
    post_norms: bool = False
    """Attention and MLP outputs are normed before the residual add."""
    norm_over_heads: bool = False
    """The norms of queries and keys are over all heads together, not over each head."""
    has_group_max_routing: bool = False
    """Group-limited routing ranks a group of experts by its best expert, not by a sum over several."""
    rotary: ScaledRotary | None = None
    """Rotary embeddings of grouped-query attention, if they are scaled."""
    has_sinks: bool = False
    """Attention has a learned sink per head, Megatron's `softmax_type="learnable"`."""
    has_softmax_bias: bool = False
    """A balancing bias chooses experts by softmax probabilities, whose chosen ones are then normalised."""

    @property
    def has_own_router(self) -> bool:
        """Whether the router is not Megatron's."""
        return self.has_group_max_routing or self.has_softmax_bias


NO_EXTRAS = Extras()  # for a model that Megatron's configuration describes completely


class StoredSlice(NamedTuple):
    """A tensor of the table as a part of a larger tensor in checkpoints, such as one expert of a stack.

    The tensor is `stored[expert]`, transposed if `transposed`, of which it has the rows `rows`.
    """

    name: str
    """The stored tensor. It has a leading dimension of experts if `expert` is not None."""
    expert: int | None = None
    rows: slice = slice(None)
    """With a step of 2 if gate and up alternate. The steps are positive."""
    transposed: bool = False


@dataclass(frozen=True)
class VisionFamily:
    """The vision tower of a family, and how images enter the text model."""

    tower: Callable[[HFConfig], list[Param]]
    """The table of the tower, which every tensor parallel rank of the first pipeline stage holds whole."""
    config: Callable[[HFConfig], dict[str, Any]]
    """`vision_config` with all defaults. Raises ConfigError for an option that is not implemented."""
    is_interleaved: bool
    """Whether time, row and column alternate among the frequencies of rotary embeddings, or have a run each."""
    text_prefix: str = "model."
    """Prefix of the text model's HF tensors. `layer` includes it; the engine's names begin with `model.`."""

    def rename(self, params: Iterable[Param]) -> list[Param]:
        """Put the HF names that begin with `model.` behind `text_prefix`."""

        def name(tensor: HFTensor) -> HFTensor:
            prefix, _, rest = tensor.name.partition("model.")
            return tensor if prefix else tensor._replace(name=self.text_prefix + rest)

        return [replace(param, hf=tuple(map(name, param.hf))) for param in params]


@dataclass(frozen=True)
class Family:
    """One model family. Every function raises ConfigError for an option it does not implement, naming the option."""

    architecture: str
    """First entry of `architectures` in config.json."""
    model_type: str
    """`model_type` in config.json."""
    check: Callable[[HFConfig], None]
    """Raises ConfigError if the config has an option that is not implemented."""
    megatron_config: Callable[[HFConfig], dict[str, Any]]
    """Keyword arguments of TransformerConfig, or of MLATransformerConfig if they have `multi_latent_attention`.

    They define what the model computes, and no parallel sizes, dtypes or fusions.
    """
    gpt_kwargs: Callable[[HFConfig], dict[str, Any]]
    """Keyword arguments of GPTModel; `vocab_size` is HF's, see `layout_algebra.padded_vocab`."""
    layer: Callable[[HFConfig, int, Iterable[int]], list[Param]]
    """The table of a decoder layer with the given routed experts.

    As in HF's numbering, a layer past the last decoder layer is a multi-token prediction layer. Never called for one if
    the model has none.
    """
    num_experts: Callable[[HFConfig], int]
    """Number of routed experts per MoE layer; 0 for a dense model."""
    tool_call_parser: str
    """SGLang's tool-call parser for these models."""
    parsers_by_type: Mapping[str, str] = field(default_factory=dict)
    """Tool-call parsers by `model_type`, for models of this architecture from other publishers."""
    extras: Callable[[HFConfig], Extras] = lambda hf: NO_EXTRAS
    """Features that `megatron_config` cannot express."""
    untrained_prefixes: Callable[[HFConfig], tuple[str, ...]] = lambda hf: ()
    """Prefixes of HF tensors that are trained only on request, if at all: of multi-token prediction layers."""
    stored_slice: Callable[[HFConfig, str], StoredSlice | None] = lambda hf, name: None
    """Where published checkpoints store the HF tensor of this name, unless under its own name.

    `hf_folder` reads both forms, and writes the form of the folder that training started from.
    """
    num_mtp_layers: Callable[[HFConfig], int] = lambda hf: 0
    """Number of multi-token prediction layers after the decoder that are in the table."""
    mtp_key: str = "num_nextn_predict_layers"
    """Key of config.json that has this number."""
    embedding_name: str = "model.embed_tokens"
    """HF's and the engine's name of the embedding."""
    engine_settings: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's settings with which it computes these models as the trainer does; `rollout.sglang` may replace them."""
    engine_only_elements: Callable[[HFConfig], int] = lambda hf: 0
    """Number of weights on each rank of an engine that are not in the table."""
    vision: VisionFamily | None = None
    """None for a family of text alone. With it, config.json may have the text model's keys in `text_config`."""

    def before_decoder(self, hf: HFConfig) -> list[Param]:
        """Return the table of what precedes the decoder layers: the embedding, and the vision tower if there is one."""
        rows = blocks.embedding(hf, self.embedding_name)
        return rows if self.vision is None else self.vision.rename(rows) + self.vision.tower(hf)

    def after_decoder(self, hf: HFConfig) -> list[Param]:
        """Return the table of the final norm and the output layer."""
        rows = blocks.final_params(hf)
        return rows if self.vision is None else self.vision.rename(rows)

    def parser(self, hf: HFConfig) -> str:
        """Return SGLang's tool-call parser for the model of this config.json."""
        return self.parsers_by_type.get(str(hf.get("model_type")), self.tool_call_parser)

    def engine_layer(self, hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
        """Return `layer` with a row for each tensor of the engine that has part of a parameter."""
        return [part for row in self.layer(hf, layer, experts) for part in row.by_slot()]

    def params(
        self, hf: HFConfig, tp: int, etp: int = 1, mtp: bool = False, max_experts: int | None = None
    ) -> list[Param]:
        """Return every trained parameter of the model, layer by layer.

        Raises ConfigError unless routed experts divide by `etp` and all other parameters by `tp`.

        mtp: include the multi-token prediction layers.
        max_experts: include only the first routed experts of each layer.
        """
        self.check(hf)
        layers = range(need(hf, "num_hidden_layers") + (self.num_mtp_layers(hf) if mtp else 0))
        experts = range(self.num_experts(hf))[:max_experts]
        rows = [row for layer in layers for row in self.layer(hf, layer, experts)]
        table = self.before_decoder(hf) + rows + self.after_decoder(hf)
        for param in table:
            split_param(param, tp if param.expert is None else etp, 0)  # raises if it does not divide
        return table


VALUE_HEAD = "score.weight"
CAUSAL_LM, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


def is_classifier(hf: HFConfig) -> bool:
    """Return whether config.json describes a sequence classifier, which has no vocabulary output layer."""
    return str((hf.get("architectures") or [""])[0]).endswith(CLASSIFIER)


def padding_of(hf: HFConfig, pad_token_id: int | None, end_of_turn: int) -> int | None:
    """Return a padding token with which no conversation ends, the tokenizer's or that of config.json, if any."""
    candidates = (pad_token_id, hf.get("pad_token_id"))
    return next((token for token in candidates if token not in (None, end_of_turn)), None)


def classifier_config(hf: HFConfig, architecture: str, pad_token_id: int | None) -> dict[str, Any]:
    """Return the config.json of a classifier with one label on the trunk of `hf`, a policy or a classifier.

    architecture: the policy's. pad_token_id: HF's classifiers score the last token that differs from it, so texts must
    not end with it. Without one they reject batches of more than one text.
    """
    return {
        **hf,
        "architectures": [architecture.replace(CAUSAL_LM, CLASSIFIER)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "num_labels": 1,
        "pad_token_id": pad_token_id,
    }
