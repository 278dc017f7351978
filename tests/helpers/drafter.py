"""A reference of SGLang's draft model in transformers. DeepSeek-V3's multi-token-prediction layer is a model of one
layer; its input combines a token's embedding with the policy's last hidden state before it, both normalized."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tiny_models
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3ForCausalLM, PreTrainedModel


def predictable_policy(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a policy that favors the token id 7 above the last one. Its multi-token-prediction layer shares the
    embedding and head and does so, too, so some drafts are accepted and others are not."""
    model = tiny_models.deepseek_v3(seed, num_nextn_predict_layers=1, **changes)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        model.lm_head.weight.add_(1.5 * embedding.roll(7, 0))
        embedding.mul_(8)
    return model


class Drafter:
    """The draft layer of a checkpoint folder, for a policy with the same embedding and head."""

    def __init__(self, policy: PreTrainedModel, folder: Path) -> None:
        self.policy = policy
        prefix = f"model.layers.{policy.config.num_hidden_layers}."
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
            if name.startswith(prefix)
        }
        self.enorm, self.hnorm = tensors.pop("enorm.weight"), tensors.pop("hnorm.weight")
        self.eh_proj = tensors.pop("eh_proj.weight")
        renamed = {
            "model.embed_tokens.weight": tensors.pop("embed_tokens.weight"),
            "model.norm.weight": tensors.pop("shared_head.norm.weight"),
            "lm_head.weight": tensors.pop("shared_head.head.weight"),
            **{f"model.layers.0.{name}": tensor for name, tensor in tensors.items()},
        }
        config = json.loads((folder / "config.json").read_text())
        config |= {"num_hidden_layers": 1, "first_k_dense_replace": 0}
        with TemporaryDirectory() as scratch:
            Path(scratch, "config.json").write_text(json.dumps(config))
            save_file(renamed, Path(scratch, "model.safetensors"), {"format": "pt"})
            self.layer = DeepseekV3ForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()

    def _normalize(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.policy.config.rms_norm_eps).rsqrt() * weight

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
