"""Score rollouts with any sequence classifier of transformers.

A classifier with the policy's own tokenizer and template reads the token ids that the engine saw. For any other
classifier, its own template renders the conversation anew from the messages, without tool schemas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from megarl.config import Config, ConfigError, plugins, strict
from megarl.models.family import is_classifier
from megarl.parallel import device
from megarl.rewards.service import OPTIONS_PREFIX
from megarl.types import Ids, Rollout, as_token_ids
from megarl.utils.text import replace_surrogates


@dataclass(frozen=True)
class ClassifierOptions:
    """Options of a sequence classifier, under `roles.reward.options`."""

    label: str = ""
    """Name or number of the label whose logit is the score. Optional for a single label."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights and of the computation."""
    on_overlong: Literal["error", "truncate"] = "error"
    """For a conversation beyond the context length: `error` ends the run and names it, `truncate` drops its
    beginning."""

    @staticmethod
    def read(options: dict[str, Any]) -> ClassifierOptions:
        """Parse options. Raises ConfigError for an invalid one."""
        label = options.get("label")
        if isinstance(label, int) and not isinstance(label, bool):
            options = {**options, "label": str(label)}
        result: ClassifierOptions = strict.build_dataclass(ClassifierOptions, options, OPTIONS_PREFIX, root=Config)
        return result


def resolve_label(hf: Mapping[str, Any], options: ClassifierOptions, path: str) -> int:
    """Return the index of the logit that is the score. Raises ConfigError for no classifier, and for a wrong label."""
    if not is_classifier(hf):
        architecture = (hf.get("architectures") or ["nothing"])[0]
        raise ConfigError(
            f"reward.model={path} is not a sequence classifier: its architecture in config.json is {architecture}"
        )
    id2label = hf.get("id2label") or {}
    names = [str(id2label.get(str(i), f"LABEL_{i}")) for i in range(int(hf.get("num_labels") or len(id2label) or 2))]
    if not options.label and len(names) > 1:
        raise ConfigError(
            f"reward.model={path} has {len(names)} labels, and a score is one number: set {OPTIONS_PREFIX}label to the "
            f"one whose logit it is ({', '.join(names[:20])})"
        )
    numbers = list(map(str, range(len(names))))
    for labels in (names, numbers, [""]):
        if options.label in labels:
            return labels.index(options.label)
    raise ConfigError(
        f"{OPTIONS_PREFIX}label={options.label}: reward.model={path} has the labels {', '.join(names[:20])}"
    )


class ClassifierTokenizer:
    """Turns rollouts into a classifier's input ids. Raises ConfigError if it lacks a tokenizer or a chat template."""

    def __init__(self, path: str, hf: Mapping[str, Any], policy_tokenizer: Any, options: ClassifierOptions) -> None:
        from transformers import AutoTokenizer

        self.path, self.on_overlong = path, options.on_overlong
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # a broken file raises many kinds
            raise ConfigError(f"reward.model={path}: no tokenizer: {plugins.format_error(error)[:500]}") from None
        template = getattr(self.tokenizer, "chat_template", None)
        has_same_vocab = self.tokenizer.get_vocab() == policy_tokenizer.get_vocab()
        self.is_policy_tokenizer = has_same_vocab and (not template or template == policy_tokenizer.chat_template)
        if not self.is_policy_tokenizer and not template:
            raise ConfigError(
                f"reward.model={path} has another tokenizer than the policy, and no chat template by which a "
                "conversation could be read: put its chat_template.jinja there"
            )
        self.limit = get_context_length(hf, int(self.tokenizer.model_max_length))

    def tokenize(self, rollout: Rollout) -> Ids:
        """Return the input ids. Raises ConfigError for a conversation that is too long or that the template rejects."""
        ids = rollout.token_ids
        if not self.is_policy_tokenizer:
            try:
                text = self.tokenizer.apply_chat_template(list(rollout.messages), tokenize=False)
            except Exception as error:  # jinja2's errors, and errors that a template raises on purpose
                raise ConfigError(
                    f"the chat template of reward.model={self.path} cannot render the sample {rollout.prompt.id!r}: "
                    f"{plugins.format_error(error)[:500]}"
                ) from None
            ids = as_token_ids(self.tokenizer.encode(replace_surrogates(str(text)), add_special_tokens=False))
        if not len(ids):
            raise ConfigError(f"reward.model={self.path}: the sample is empty: {rollout.prompt.id!r}")
        if len(ids) > self.limit and self.on_overlong == "error":
            raise ConfigError(
                f"the sample {rollout.prompt.id!r} is {len(ids)} tokens for reward.model={self.path}, whose context is "
                f"{self.limit}: lower rollout.max_context, or set {OPTIONS_PREFIX}on_overlong=truncate, which "
                "truncates its beginning"
            )
        return ids


def get_context_length(hf: Mapping[str, Any], tokenizer_limit: int) -> int:
    """Return the context length in tokens: at most `tokenizer_limit`, which is huge if the tokenizer does not know."""
    context_length = hf.get("max_position_embeddings") or hf.get("n_positions") or tokenizer_limit
    return min(int(context_length), tokenizer_limit)


class Classifier:
    """The unsharded classifier in a folder. Raises ConfigError if transformers cannot load it or misses weights."""

    def __init__(self, path: str, label: int, options: ClassifierOptions) -> None:
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        dtype = getattr(torch, options.dtype)
        try:
            model, loading_info = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # transformers raises many kinds
            raise ConfigError(
                f"reward.model={path}: transformers cannot load it as a classifier: {plugins.format_error(error)[:500]}"
            ) from None
        if missing_keys := sorted(map(str, loading_info["missing_keys"])):
            raise ConfigError(
                f"reward.model={path}: {', '.join(missing_keys[:3])} is missing; it is not a whole classifier"
            )
        self.label = label
        self.model: Any = model.eval().requires_grad_(False)
        self.padding: int | None = getattr(model.config.get_text_config(), "pad_token_id", None)

    def offload(self, weights: bool = True) -> int:
        """Move the model to the host until it is next needed. Returns 0: its bytes are not counted."""
        if weights:
            self.model.cpu()
        return 0

    @torch.no_grad()
    def score(self, texts: Sequence[torch.Tensor], budget: int) -> list[float]:
        """Return the logit of `label` for each text.

        budget: tokens per batch, padding included; a longer text runs alone. Classifiers that score the last token find
        it by the padding token. Without one they refuse batches, so their texts run one at a time.
        """
        target_device = device.device()
        self.model.to(target_device)
        scores = [0.0] * len(texts)
        lengths = [len(text) for text in texts]
        for batch in batches(lengths, 1 if self.padding is None else budget):
            rows = [texts[i].long() for i in batch]
            ids = pad_sequence(rows, batch_first=True, padding_value=self.padding or 0)
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            logits = self.model(input_ids=ids.to(target_device), attention_mask=mask.to(target_device)).logits
            for i, score in zip(batch, logits[:, self.label].float().tolist(), strict=True):
                scores[i] = score
        return scores


def batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return batches of text indices, longest first, of at most `budget` tokens padded to the longest text."""
    result: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if result and (len(result[-1]) + 1) * lengths[result[-1][0]] <= budget:
            result[-1].append(i)
        else:
            result.append([i])
    return result
