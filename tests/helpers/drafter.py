"""What SGLang's draft model has to propose, by transformers: DeepSeek-V3's layer of multi-token prediction is a model
of one layer, whose input is made of a token's embedding and the policy's last hidden state, normed, before it."""

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


def foreseeable(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A policy that likes to go on with the token 7 numbers later, and so does its layer of multi-token prediction,
    which shares its embedding and head: some drafts are accepted, others are not."""
    model = tiny_models.deepseek_v3(seed, num_nextn_predict_layers=1, **changes)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        model.lm_head.weight.add_(1.5 * embedding.roll(7, 0))
        embedding.mul_(8)
    return model


class Drafter:
    """The draft layer in a folder, for a policy whose embedding and head it has."""

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
        named = {
            "model.embed_tokens.weight": tensors.pop("embed_tokens.weight"),
            "model.norm.weight": tensors.pop("shared_head.norm.weight"),
            "lm_head.weight": tensors.pop("shared_head.head.weight"),
            **{f"model.layers.0.{name}": tensor for name, tensor in tensors.items()},
        }
        config = json.loads((folder / "config.json").read_text())
        config |= {"num_hidden_layers": 1, "first_k_dense_replace": 0}
        with TemporaryDirectory() as scratch:
            Path(scratch, "config.json").write_text(json.dumps(config))
            save_file(named, Path(scratch, "model.safetensors"), {"format": "pt"})
            self.layer = DeepseekV3ForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.policy.config.rms_norm_eps).rsqrt() * weight

    @torch.no_grad()
    def propose(self, ids: Sequence[int], number: int) -> list[int]:
        """The likeliest tokens after `ids`; from the second one on, the layer's own output is its hidden state."""
        hidden = self.policy.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        tokens = list(ids[1:])
        for _ in range(number):
            embedded = self._normed(self.layer.model.embed_tokens(torch.tensor(tokens)), self.enorm)
            joint = torch.cat([embedded, self._normed(hidden, self.hnorm)], dim=-1) @ self.eh_proj.T
            out = self.layer.model(inputs_embeds=joint[None]).last_hidden_state[0, -1:]
            tokens.append(int(self.layer.lm_head(out).argmax()))
            hidden = torch.cat([hidden, out])
        return tokens[-number:]

    def outcome(self, prompt: list[int], tokens: int, drafts: int) -> tuple[int, int]:
        """How many tokens are drafted, and accepted, until at least `tokens` greedy ones are written.

        The first token comes from the prompt's own pass; then each round drafts after the last token that is there.
        """
        ids = prompt + tiny_models.greedy(self.policy, prompt, tokens + drafts)
        there, rounds, accepted = len(prompt) + 1, 0, 0
        while there < len(prompt) + tokens:
            proposed, right = self.propose(ids[:there], drafts), 0
            while right < drafts and proposed[right] == ids[there + right]:
                right += 1
            rounds, accepted, there = rounds + 1, accepted + right, there + right + 1
        return rounds * drafts, accepted
