"""Distillation from a teacher with another tokenizer: its tokens of the same answers, and their spans in common.

The teacher reads the prompt in its own chat template and the text of the policy's answer in its own tokens. In a span
of text between two boundaries that both tokenizations have, the sums of log-probs compare
(`algorithms/token_spans.py`). With a span s of the policy's tokens and of the teacher's,

    A_t = sum_{j in s} log pi_teacher(b_j) - sum_{i in s} log pi(a_i)    for each of the policy's tokens t in s.

This is the policy gradient of the reverse KL of whole spans. The teacher's sum is the probability of its own
tokenization of the text, not of all tokenizations. Equal tokenizers give one token per span, and the loss of
`controllers/distill.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from megarl.algorithms.token_spans import align_spans, token_ends
from megarl.chat_format.chat_template import ChatTemplate
from megarl.types import Prompt, Rollouts, Turn, as_token_ids


@dataclass(frozen=True)
class Alignment:
    """Conversations in a teacher's tokens, and the spans of their answers."""

    rollouts: Rollouts  # in the teacher's tokens, in the order of the policy's
    heads: torch.Tensor  # [T] int64, of the policy's tokens: index in [T] of the first one of its span; -1 without one
    targets: torch.Tensor  # [A] int64, of the teacher's action tokens: index in [T] of its span's head; -1 without one

    def gather_targets(self, logprobs: torch.Tensor) -> torch.Tensor:
        """[A] log-probs of the teacher's action tokens -> [T]: each span's sum, at its head; 0 elsewhere."""
        has_span = self.targets >= 0
        sums = torch.zeros(len(self.heads), dtype=torch.float64)
        return sums.index_add_(0, self.targets[has_span], logprobs[has_span].double()).to(logprobs.dtype)

    def sum_spans(self, values: torch.Tensor) -> torch.Tensor:
        """[T] -> [T]: the sum over each token's span; 0 without one."""
        has_span = self.heads >= 0
        sums = torch.zeros(len(values), dtype=torch.float64)
        sums.index_add_(0, self.heads[has_span], values[has_span].double())
        return torch.where(has_span, sums[self.heads.clamp(min=0)], 0.0).to(values.dtype)


def align_rollouts(
    rollouts: Rollouts, chat: ChatTemplate, teacher: ChatTemplate, fill: Callable[[Prompt], Prompt]
) -> Alignment:
    """Return the rollouts in a teacher's tokens, and their spans. Collective.

    Each conversation is a prompt and one answer. An answer whose text the teacher's tokenizer cannot reproduce, bytes
    that are no text, and the end of an answer that was cut within a character have no spans. fill: returns the prompt
    that the teacher reads.
    """
    local, heads, targets, offset = [], [], [], 0
    prompts: dict[str, Turn] = {}
    for rollout in rollouts.local:
        prompt = rollout.prompt
        if prompt.id not in prompts:
            rendered = teacher.render_prompt(fill(prompt))
            prompts[prompt.id] = Turn(rendered.token_ids, images=rendered.images)
        head = len(rollout.turns[0].token_ids)
        answer: list[int] = rollout.turns[1].token_ids.tolist() if len(rollout.turns) > 1 else []
        ids, student_spans, teacher_spans = align_answer(answer, chat, teacher)
        start, rest = offset + head, rollout.num_tokens - head - len(student_spans)
        first_tokens: dict[int, int] = {}
        for position, span in enumerate(student_spans):
            first_tokens.setdefault(span, start + position)
        first_tokens[-1] = -1
        heads += [-1] * head + [first_tokens[span] for span in student_spans] + [-1] * rest
        targets += [first_tokens[span] for span in teacher_spans]
        offset += rollout.num_tokens
        turns = (prompts[prompt.id], Turn(as_token_ids(ids), np.zeros(len(ids), np.float32), True))
        local.append(replace(rollout, turns=turns, routing=None, sparse_indices=None, sampling_mask=None))
    taught = rollouts.replace_local(local)
    return Alignment(taught, *(torch.tensor(column, dtype=torch.int64) for column in (heads, targets)))


def align_answer(
    answer: list[int], chat: ChatTemplate, teacher: ChatTemplate
) -> tuple[list[int], list[int], list[int]]:
    """Return the teacher's tokens of an answer, and the spans of the policy's tokens and of the teacher's."""
    has_ended = bool(answer) and answer[-1] in chat.end_token_ids
    body = answer[:-1] if has_ended else answer
    ends = token_ends(body, chat.decode)
    length = next((end for end in reversed(ends) if end is not None), 0)
    text = chat.decode(body)[:length]
    ids = teacher.encode(text)
    if teacher.decode(ids) == text:
        student_spans, teacher_spans = align_spans(text, ends, token_ends(ids, teacher.decode))
    else:
        student_spans, teacher_spans = [-1] * len(body), [-1] * len(ids)
    if has_ended:  # the end of the turn is a span of its own, unless the teacher lacks bytes before it
        span = -1 if ends and ends[-1] is None else max([*student_spans, -1]) + 1
        student_spans, teacher_spans, ids = [*student_spans, span], [*teacher_spans, span], [*ids, teacher.end_of_turn]
    return ids, student_spans, teacher_spans
