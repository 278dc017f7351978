"""Prompts, and what is sampled for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from megarl.config.job import Ranks
from megarl.strict import Count, PathStr, Range, Seconds, Share

Batch = Annotated[int, Range(1, 1_000_000)]
OnPush = Literal["retract", "in_place", "wait"]


@dataclass(frozen=True)
class RolloutConfig:
    tp: Ranks = 1
    """Ranks per engine: as many engines run as its ranks have room for, each tensor parallel over its ranks."""
    ep: Ranks = 1
    """Expert parallel size inside an engine; divides rollout.tp."""
    samples_per_prompt: Batch = 8
    """Rollouts of each prompt in training."""
    max_turns: Count = 5
    """Turns that the policy may take in one conversation."""
    max_new_tokens: Count = 1024
    """Tokens that the policy may write in one turn."""
    max_context: Count = 4096
    """Tokens of a whole conversation. Longer prompts are dropped and counted."""
    temperature: Annotated[float, Range(0, 100)] = 1.0
    """Sampling temperature in training; 0 is greedy. Evaluation runs both greedy and at this temperature, or at
    `rollout.eval_temperature`."""
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Nucleus sampling: only the likeliest tokens that have this probability together are drawn from. Then, and with
    `top_k` or `min_p`, log-probs, entropy and KL are of the distribution that was drawn from, not of all tokens. Needs
    `rollout.top_k`, too."""
    top_k: Annotated[int, Range(-1, 4096)] = -1
    """Only so many of the likeliest tokens are drawn from, 2 or more; -1 for all of them."""
    min_p: Annotated[float, Range(0, below=1)] = 0.0
    """Only tokens are drawn that have this share of the likeliest one's probability; 0 for all. Needs `rollout.top_k`,
    too."""
    eval_temperature: Annotated[float, Range(above=0, most=100)] | None = None
    """`rollout.temperature` of the sampled answers of an evaluation; null is that of training."""
    eval_top_p: Annotated[float, Range(above=0, most=1)] | None = None
    """`rollout.top_p` of the sampled answers of an evaluation, which needs no `rollout.top_k`; null is that of
    training."""
    tools: tuple[str, ...] = ()
    """Tools as `module:name`; a prompt may call those that it lists, or all where it lists none."""
    environments: tuple[str, ...] = ()
    """Environments as `module:Class`, or agents, see `environments/README.md`. A prompt's column `environment` names
    its own; one that names none has the first."""
    tool_timeout: Seconds = 30.0
    """Seconds that a tool may take before it is killed; the policy then sees the time-out as its observation. An
    environment's methods, too, unless its class has a `timeout`: then the conversation is aborted."""
    max_failed_tools: Share = 0.99
    """Share of a tool's calls that may fail inside the tool: it raises, dies, or is stopped by `rollout.tool_timeout`.
    Judged of 16 calls or more together; beyond it the run stops. Calls that the policy gets wrong, malformed or with
    arguments that the schema does not allow, reach no tool and do not count."""
    tool_memory_mb: Annotated[int, Range(0, 100_000_000)] = 4096
    """MiB of data that each process of tools, environments and reward functions may have, and each that it starts; 0
    for no limit."""
    pass_env: tuple[str, ...] = ()
    """Variables of the environment that tools, environments and reward functions are given; they see PATH, HOME, the
    language and the like, and no others: no tokens, no keys."""
    max_observation: Count = 1024
    """Tokens of one tool's result that the policy gets to see: of a longer one its beginning and its end, and a mark
    between that says how many are cut. Results are cut further where `rollout.max_context` has no room for them."""
    tool_call_parser: str = ""
    """SGLang's parser for this model's tool calls; empty for that of the model's family."""
    draft_tokens: Annotated[int, Range(0, 1024)] = 0
    """Tokens that the model's own layer of multi-token prediction drafts at a time, and that the policy then accepts or
    replaces (speculative decoding): the same distribution in fewer steps. 0 is off."""
    concurrency: Batch = 128
    """Conversations at once per engine, not counting those that wait for a tool, which may be as many more. An engine
    has up to twice as many processes for tools; one is started where a call would wait for another's. An environment
    has one for each of its conversations."""
    asynchronous: bool = False
    """Engines on ranks of their own (`placement.rollout`) go on generating while the others train: a step's prompts are
    begun up to `rollout.max_lag` steps before it is their turn, and answers go on through the pushes of weights. The
    importance ratio of tokens that older weights chose is that to the engine's own log-probs of then."""
    on_push: OnPush = "retract"
    """What becomes of answers under way when `rollout.asynchronous` engines get weights: `retract` cuts them off and
    goes on with the tokens that they have, all keys and values computed anew; `in_place` goes on where they were, with
    those of the old weights, which costs nothing, and biases a little; `wait` lets them end first, so that each answer
    is by one version of the weights."""
    oversample: Annotated[float, Range(1, 100)] = 1.0
    """Prompts under way in a step over those that it needs, `data.prompts_per_step`. When as many are done, the others
    are stopped, and gone on with in the next step. 1 is off: a step waits for its longest answer."""
    max_lag: Annotated[int, Range(0, 1000)] = 1
    """Versions by which a rollout's first token may be older than the weights that are trained. `rollout.asynchronous`
    begins no prompt earlier: 0 is on policy, 1 overlaps a step's generation with the training before it. With
    `rollout.oversample` what would be older is begun anew. `rollout/lag_mean` and others say what it comes to, and
    `rollout/logprob_diff_stale` compares such tokens' log-probs, which are of the weights that chose them,
    `rollout/logprob_diff_carried` those of newer tokens behind them."""
    request_timeout: Seconds = 600.0
    """Seconds that one answer of the engine may take, from when it begins to work on it; the conversation is aborted
    then."""
    step_timeout: Seconds = 7200.0
    """Seconds that the rollouts of a step may take in all; what is not done by then is aborted."""
    hang_timeout: Seconds = 120.0
    """Seconds that an engine may go without a sign of life while it is asked for something, or take to write a bucket
    of weights, before it is ended and started again. Kernels that are compiled at the first request count."""
    max_aborted: Share = 0.1
    """Share of a step's rollouts that may be aborted, by a failure or a time-out; beyond it the run stops, and waits
    for no others. They are recorded, and neither a loss nor a statistic contains them."""
    start_timeout: Seconds = 600.0
    """Seconds that an engine may take to start, and to do what it is told: wake, sleep, take weights."""
    push_bucket_mb: Batch = 1024
    """MiB that each rank may stage for sending weights to engines, and as much for receiving them."""
    verify_every: Count = 20
    """The engines' weights are verified bit by bit in the first push and every so many; in the others, one part in so
    many of them."""
    replay: PathStr = ""
    """A run folder whose recorded rollouts are used instead of generating: for training without engines, debugging and
    exact repeats. `RUN@7`: the first step is given those of its step 7."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Further fields of SGLang's ServerArgs, by its own names."""

    @property
    def held_out(self) -> RolloutConfig:
        """The same with the sampling of an evaluation."""
        temperature = self.temperature if self.eval_temperature is None else self.eval_temperature
        return replace(self, temperature=temperature, top_p=self.top_p if self.eval_top_p is None else self.eval_top_p)

    @property
    def cut_off(self) -> bool:
        """Whether some tokens cannot be drawn in training, so that the engine has to say which could be."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class DataConfig:
    train: tuple[PathStr, ...] = ()
    """Prompts to train on, a file or several: .parquet with verl's columns, or .jsonl. Conversations for SFT, pairs for
    a reward model; `data/README.md` has the columns. What is longer than the model, or `rollout.max_context`, is left
    out and counted."""
    weights: tuple[Annotated[float, Range(above=0, most=1_000_000)], ...] = ()
    """One for each file of `data.train`: the shares that they have in every step, each with epochs of its own. Without,
    they are one data set."""
    order: str = ""
    """Column of numbers by whose order the first epoch goes, from the least: a curriculum. Later ones are shuffled;
    without `data.shuffle` all go by it. Ties, and rows without a number, are where the shuffling puts them."""
    eval: tuple[PathStr, ...] = ()
    """Held-out prompts, conversations or pairs, a file or several, same formats; empty for none."""
    prompts_per_step: Batch = 64
    """Prompts in one rollout batch; conversations or pairs in a step of SFT or of a reward model."""
    prompt_key: str = "prompt"
    """Column of the prompt: a list of chat messages, or a string that becomes one user message."""
    label_key: str = "ground_truth"
    """Column of the ground truth where there is no `reward_model.ground_truth`; for SFT, where it is set, that of the
    answer to the prompt."""
    shuffle: bool = True
    """Shuffle anew each epoch, by `run.seed`."""


def under_way(needed: int, oversample: float) -> int:
    """Groups that a step has under way at most, those of earlier steps among them, where it needs so many."""
    return math.ceil(round(oversample * needed, 6))  # 1.1 * 10 is a little more than 11
