"""What a controller's `items` reads: prompts, conversations or pairs, in the form that the run's model has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config import Config, ConfigError
from megarl.data.preferences import Preferences, read_preferences
from megarl.data.prompts import read_prompts, render_prompts
from megarl.data.sft import Demonstrations, sft_rollouts
from megarl.models.registry import family_of
from megarl.parallel import everyone, ranks
from megarl.rollout.chat import Chat
from megarl.types import Prompt, Rollout, Rollouts


class Items:
    """Of a flow. What is left out is said in a line of `_notes`, which is for the log."""

    config: Config
    hf_config: dict[str, Any]
    chat: Chat
    job: ranks.Job
    _notes: list[str]

    def load_prompts(self, path: str) -> list[Prompt]:
        """Read and render prompts; those that leave no room for an answer are dropped, and a line says how many."""
        data = self.config.data
        prompts = read_prompts(path, data.prompt_key, data.label_key)
        kept, dropped = render_prompts(prompts, self.chat.render, self.config.rollout.max_context - 1)
        if dropped:
            self._notes.append(
                f"{path}: {dropped} of {len(prompts)} prompts are longer than rollout.max_context: left out"
            )
        return kept

    def load_conversations(self, path: str) -> Demonstrations:
        """Read conversations for SFT; those longer than the model's positions are dropped, and a line says how many."""
        talks, longest = sft_rollouts(path, self.chat.tokenizer), self._positions()
        lengths = ranks.shared_out(len(talks), lambda index: talks[index].num_tokens)
        kept = [index for index, length in enumerate(lengths) if length <= longest]
        dropped = len(talks) - len(kept)
        left_out = f"{path}: {dropped} of {len(talks)} conversations are longer than the model's {longest} positions"
        if not kept:
            raise ConfigError(f"{left_out}, so none is left; the shortest has {min(lengths)} tokens")
        if dropped:
            self._notes.append(f"{left_out}: left out")
        return talks.only(kept)

    def load_preferences(self, path: str) -> Preferences:
        """Read pairs; those that do not fit into a micro-batch or the model are dropped, and a line says how many."""
        budget = self.config.train.token_budget * self.config.parallel.cp
        longest = self._positions()
        pairs, dropped = read_preferences(path, self.chat.tokenizer, budget, longest)
        if dropped:
            self._notes.append(
                f"{path}: {dropped} of {len(pairs) + dropped} pairs are left out: together longer than "
                f"the {budget} of a micro-batch (train.token_budget), or one beyond the model's {longest} positions"
            )
        return pairs

    def _positions(self) -> int:
        return int(family_of(self.hf_config).gpt_kwargs(self.hf_config)["max_sequence_length"])

    def deal(self, finished: Sequence[Rollout], together: int = 1) -> Rollouts:
        """Conversations that every rank can read, dealt out: each keeps its share, which it alone tokenises.

        together: as many at a time stay with each other.
        """
        units = range(self.job.rank, -(-len(finished) // together), self.job.world)
        own = [i for unit in units for i in range(unit * together, min((unit + 1) * together, len(finished)))]
        return Rollouts.of([finished[i] for i in own], own, everyone.AllRanks())
