"""A reference of SGLang's draft model in transformers. The multi-token-prediction layer is a model of one layer; its
input combines a token's embedding with the policy's last hidden state before it, both normalized."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tiny_models
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel


def predictable_policy(
    seed: int = 0, build: Callable[..., PreTrainedModel] = tiny_models.deepseek_v3, **changes: Any
) -> PreTrainedModel:
    """Return a policy that favors the token id 7 above the last one. Its multi-token-prediction layer shares the
    embedding and head and does so, too, so some drafts are accepted and others are not."""
    model = build(seed, num_nextn_predict_layers=1, **changes)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        model.lm_head.weight.add_(1.5 * embedding.roll(7, 0))
        embedding.mul_(8)
    return model


class Drafter:
    """The draft layer of a checkpoint folder, for a policy with the same embedding and head."""

    def __init__(self, policy: PreTrainedModel, folder: Path) -> None:
        self.policy = policy
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
        if "mtp.fc.weight" in tensors:
            prefix, inner, config["layer_types"] = "mtp.", "layers.0.", ["full_attention"]
            names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
            shared = {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        else:
            prefix, inner = f"model.layers.{policy.config.num_hidden_layers}.", ""
            names = "enorm", "hnorm", "eh_proj", "shared_head.norm"
            config["first_k_dense_replace"] = 0
            copies = {"model.embed_tokens": "embed_tokens", "lm_head": "shared_head.head"}
            shared = {f"{name}.weight": tensors.pop(f"{prefix}{own}.weight") for name, own in copies.items()}
        self.enorm, self.hnorm, self.eh_proj, last_norm = (tensors.pop(f"{prefix}{name}.weight") for name in names)
        self.is_zero_centered = inner != ""
        renamed = {
            "model.norm.weight": last_norm,
            **shared,
            **{
                f"model.layers.0.{name.removeprefix(prefix + inner)}": tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix + inner)
            },
        }
        with TemporaryDirectory() as scratch:
            Path(scratch, "config.json").write_text(json.dumps(config))
            save_file(renamed, Path(scratch, "model.safetensors"), {"format": "pt"})
            self.layer = type(policy).from_pretrained(scratch, dtype=torch.float32).eval()

    def _normalize(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        factor = (x.square().mean(-1, keepdim=True) + self.policy.config.rms_norm_eps).rsqrt()
        return x * factor * (weight + self.is_zero_centered)

    @torch.no_grad()
    def propose(self, ids: Sequence[int], number: int) -> list[int]:
        """Return the likeliest tokens after `ids`. From the second on, the hidden state is the layer's own output."""
        hidden = self.policy.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        tokens = list(ids[1:])
        for _ in range(number):
            embedded = self._normalize(self.layer.model.embed_tokens(torch.tensor(tokens)), self.enorm)
            joint = torch.cat([embedded, self._normalize(hidden, self.hnorm)], dim=-1) @ self.eh_proj.T
            out = self.layer.model(inputs_embeds=joint[None]).last_hidden_state[0, -1:]
            tokens.append(int(self.layer.lm_head(out).argmax()))
            hidden = torch.cat([hidden, out])
        return tokens[-number:]

    def count_drafts(self, prompt: list[int], tokens: int, drafts: int) -> tuple[int, int]:
        """Return the numbers of drafted and accepted tokens until at least `tokens` greedy ones are generated.

        The prefill yields the first token; then each round drafts after the last known token.
        """
        ids = prompt + tiny_models.greedy(self.policy, prompt, tokens + drafts)
        length, rounds, accepted = len(prompt) + 1, 0, 0
        while length < len(prompt) + tokens:
            proposed, matching = self.propose(ids[:length], drafts), 0
            while matching < drafts and proposed[matching] == ids[length + matching]:
                matching += 1
            rounds, accepted, length = rounds + 1, accepted + matching, length + matching + 1
        return rounds * drafts, accepted
