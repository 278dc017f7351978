"""Any sequence classifier of transformers as a judge of conversations.

Of the policy's own tokenizer and template it reads the ids that the engine saw. Of others the conversation is rendered
anew, by the classifier's own template, from its messages; schemas of tools are then not shown to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from megarl.config import Config, ConfigError, plugins, strict
from megarl.models.scalar_head import is_classifier
from megarl.parallel import device
from megarl.types import Ids, Rollout, as_token_ids
from megarl.utils.text import replace_surrogates

OPTIONS_PREFIX = "roles.reward.options."


@dataclass(frozen=True)
class ClassifierOptions:
    label: str = ""
    """The label whose logit is the score, by its name or number; may be left out where there is one only."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Its weights and what it computes in."""
    longer: Literal["stop", "cut"] = "stop"
    """What a conversation beyond its context does: the run stops and names it, or it loses its beginning."""

    @staticmethod
    def read(options: dict[str, Any]) -> ClassifierOptions:
        """Raises ConfigError for what is none of these."""
        label = options.get("label")
        if isinstance(label, int) and not isinstance(label, bool):
            options = {**options, "label": str(label)}
        found: ClassifierOptions = strict.build_dataclass(ClassifierOptions, options, OPTIONS_PREFIX, root=Config)
        return found


def resolve_label(hf: Mapping[str, Any], options: ClassifierOptions, path: str) -> int:
    """Which of a classifier's logits is the score. Raises ConfigError where `path` is no classifier, and where that is
    not said."""
    if not is_classifier(hf):
        named = (hf.get("architectures") or ["nothing"])[0]
        raise ConfigError(
            f"reward.model={path} is no sequence classifier: config.json has {named} for its architecture"
        )
    known = hf.get("id2label") or {}
    names = [str(known.get(str(i), f"LABEL_{i}")) for i in range(int(hf.get("num_labels") or len(known) or 2))]
    if not options.label and len(names) > 1:
        raise ConfigError(
            f"reward.model={path} has {len(names)} labels, and a score is one number: set {OPTIONS_PREFIX}label to the one "
            f"whose logit it is ({', '.join(names[:20])})"
        )
    if not options.label:
        return 0
    numbers = list(map(str, range(len(names))))
    for known_as in (names, numbers):
        if options.label in known_as:
            return known_as.index(options.label)
    raise ConfigError(
        f"{OPTIONS_PREFIX}label={options.label}: reward.model={path} has the labels {', '.join(names[:20])}"
    )


class ClassifierTokenizer:
    """What a classifier reads of a rollout.

    policy: the policy's tokenizer. Raises ConfigError where the classifier has none, or another one without a template.
    """

    def __init__(self, path: str, hf: Mapping[str, Any], policy: Any, options: ClassifierOptions) -> None:
        from transformers import AutoTokenizer

        self.path, self.longer = path, options.longer
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # whatever the readers of a broken file raise
            raise ConfigError(f"reward.model={path}: no tokenizer there: {plugins.format_error(error)[:500]}") from None
        template = getattr(self.tokenizer, "chat_template", None)
        alike = self.tokenizer.get_vocab() == policy.get_vocab()
        self.is_policy_tokenizer = alike and (not template or template == policy.chat_template)
        if not self.is_policy_tokenizer and not template:
            raise ConfigError(
                f"reward.model={path} has another tokenizer than the policy, and no chat template by which a "
                "conversation could be read: put its chat_template.jinja there"
            )
        self.limit = get_context_length(hf, int(self.tokenizer.model_max_length))

    def tokenize(self, rollout: Rollout) -> Ids:
        """Raises ConfigError for a conversation that its template does not take, or that is too long."""
        ids = rollout.token_ids if self.is_policy_tokenizer else self._render(rollout)
        if not len(ids):
            raise ConfigError(f"reward.model={self.path}: there is nothing to read in the sample {rollout.prompt.id!r}")
        if len(ids) > self.limit and self.longer == "stop":
            raise ConfigError(
                f"the sample {rollout.prompt.id!r} is {len(ids)} tokens for reward.model={self.path}, whose context is "
                f"{self.limit}: lower rollout.max_context, or set {OPTIONS_PREFIX}longer=cut, which cuts its beginning off"
            )
        return ids

    def _render(self, rollout: Rollout) -> Ids:
        try:
            text = self.tokenizer.apply_chat_template(list(rollout.messages), tokenize=False)
        except Exception as error:  # jinja2's errors and whatever a template raises on purpose
            raise ConfigError(
                f"the chat template of reward.model={self.path} cannot render the sample {rollout.prompt.id!r}: "
                f"{plugins.format_error(error)[:500]}"
            ) from None
        return as_token_ids(self.tokenizer.encode(replace_surrogates(str(text)), add_special_tokens=False))


def get_context_length(hf: Mapping[str, Any], longest: int) -> int:
    """Tokens that a model takes. longest: what its tokenizer says, which is large where it does not know."""
    said = next((hf[name] for name in ("max_position_embeddings", "n_positions") if hf.get(name)), longest)
    return min(int(said), longest)


class Classifier:
    """The model of a folder, whole, on this rank's device. Raises ConfigError where transformers cannot load it, or
    finds weights missing there."""

    def __init__(self, path: str, label: int, options: ClassifierOptions) -> None:
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        kind = getattr(torch, options.dtype)
        try:
            model, found = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=kind, local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # it has many kinds
            raise ConfigError(
                f"reward.model={path}: transformers cannot load it as a classifier: {plugins.format_error(error)[:500]}"
            ) from None
        if lost := sorted(map(str, found["missing_keys"])):
            raise ConfigError(f"reward.model={path}: {', '.join(lost[:3])} is missing; it is not a whole classifier")
        self.label = label
        self.model: Any = model.eval().requires_grad_(False)
        self.padding: int | None = getattr(model.config.get_text_config(), "pad_token_id", None)

    def offload(self, weights: bool = True) -> int:
        """To the host, until it is needed again; returns 0, for nobody counts it."""
        if weights:
            self.model.to(device.host())
        return 0

    @torch.no_grad()
    def score(self, texts: Sequence[torch.Tensor], budget: int) -> list[float]:
        """The logit of each text's label. budget: tokens at once, padding included; a longer text is alone.

        Classifiers with the score at the last token find that by the token that they pad with. Without one they refuse
        batches of several texts, which then go one by one.
        """
        place = device.device()
        self.model.to(place)
        found = [0.0] * len(texts)
        lengths = [len(text) for text in texts]
        for part in batches(lengths, 1 if self.padding is None else budget):
            longest = max(lengths[i] for i in part)
            ids = torch.full((len(part), longest), self.padding or 0, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(part):
                ids[row, : lengths[i]], mask[row, : lengths[i]] = texts[i], 1
            logits = self.model(input_ids=ids.to(place), attention_mask=mask.to(place)).logits
            for i, score in zip(part, logits[:, self.label].float().tolist(), strict=True):
                found[i] = score
        return found


def batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Numbers of texts by batches, the longest first, each padded to its longest of at most `budget` tokens."""
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    found: list[list[int]] = []
    for i in order:
        if found and (len(found[-1]) + 1) * lengths[found[-1][0]] <= budget:
            found[-1].append(i)
        else:
            found.append([i])
    return found
