"""Call reward functions written for verl or TRL as functions of a rollout, by a prefix in `reward.functions`.

    verl:my_reward:compute_score     compute_score(data_source, solution_str, ground_truth, extra_info=None)
    trl:my_reward:right              right(prompts, completions, **columns), completions as lists of messages
    trl_text:my_reward:right         the same with completions as texts

Arguments are passed by name, and only those that a function takes. Functions of batches get a batch of one rollout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config import ConfigError, plugins
from megarl.types import Message, Prompt, Reward, Rollout
from megarl.types.reward_values import RewardError, parse_number

PREFIXES = ("verl", "trl", "trl_text")
NOT_APPLICABLE = "not_applicable"
"""Part that is 1 where a TRL function returns None."""
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_TRL = ("prompts", "completions", "completion_ids")
_TRL_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that only TRL's trainer has."""


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function that can be passed by name. takes_any: it has `**kwargs`."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool

    @staticmethod
    def read(function: Callable[..., Any], what: str) -> Parameters:
        """Read a signature. Raises ConfigError if there is none, or if an argument must be passed by position."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:
            raise ConfigError(f"{what} has no signature that Python can read; wrap it in a function") from None
        for parameter in parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
                raise ConfigError(f"{what} takes {parameter.name!r} by position only; arguments are passed by name")
        named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        return Parameters(
            tuple(each.name for each in named),
            tuple(each.name for each in named if each.default is each.empty),
            any(each.kind is each.VAR_KEYWORD for each in parameters),
        )

    def accepts(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def select(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that the function takes."""
        return {name: value for name, value in arguments.items() if self.accepts(name)}


def split_prefix(name: str) -> tuple[str, str]:
    """Split an entry of `reward.functions` into prefix and `module:name`.

    The prefix is empty for a function of a rollout. Raises ConfigError for an unknown prefix.
    """
    prefix, _, spec = name.partition(":")
    if ":" not in spec:
        return "", name
    if prefix not in PREFIXES:
        raise ConfigError(
            f"reward.functions: {name!r} is not of the form module:name, and {prefix!r} is no prefix for the signature "
            f"of another library ({', '.join(PREFIXES)})"
        )
    return prefix, spec


def find_prefix(function: Callable[..., Any]) -> str:
    """Return the prefix that a function's parameters call for; empty if they are not those of verl or TRL."""
    try:
        names = inspect.signature(function).parameters
    except ValueError:
        return ""
    if "solution_str" in names or "solution_strs" in names:
        return "verl"
    return "trl" if "completions" in names else ""


def adapt(prefix: str, function: Callable[..., Any], what: str) -> Callable[[Rollout], Any]:
    """Return a function of a rollout that calls `function` as the library of the prefix does.

    The result is a coroutine function if `function` is. Raises ConfigError, prefixed with `what`, if the function lacks
    the argument with the response, or requires one that is not passed.
    """
    parameters = Parameters.read(function, what)
    if prefix == "verl":
        return _adapt_verl(function, parameters, what)
    return _adapt_trl(function, parameters, what, as_text=prefix == "trl_text")


def _adapt_verl(function: Callable[..., Any], parameters: Parameters, what: str) -> Callable[[Rollout], Any]:
    is_batched = "solution_strs" in parameters.names
    names = _VERL_BATCH if is_batched else _VERL
    signature = f"verl's are {', '.join(_VERL)}, or for batches {', '.join(_VERL_BATCH)}"
    if not parameters.accepts(names[1]):
        raise ConfigError(f"{what} must take solution_str or solution_strs, not {_join(parameters.names)}; {signature}")
    if unknown := [name for name in parameters.required if name not in names]:
        raise ConfigError(f"{what} requires {unknown[0]!r}, which is not passed; {signature}")

    def build(rollout: Rollout) -> dict[str, Any]:
        prompt = rollout.prompt
        extra_info = {**prompt.extra, "num_turns": len(rollout.turns)}
        values = prompt.data_source, join_contents(split_messages(rollout)[1]), prompt.ground_truth, extra_info
        return dict(zip(names, [[value] for value in values] if is_batched else values, strict=True))

    def parse(result: Any) -> Any:
        return parse_verl_score(take_only(result) if is_batched else result)

    return _make_function(function, lambda rollout: parameters.select(build(rollout)), parse)


def _adapt_trl(
    function: Callable[..., Any], parameters: Parameters, what: str, as_text: bool
) -> Callable[[Rollout], Any]:
    if not parameters.accepts("completions"):
        raise ConfigError(
            f"{what} must take completions, not {_join(parameters.names)}; TRL passes {', '.join(_TRL)} and the columns"
        )
    if needed := [name for name in parameters.required if name in _TRL_TRAINER]:
        raise ConfigError(f"{what} requires {needed[0]!r}, which only TRL's trainer has; give it a default")
    columns = [name for name in parameters.required if name not in _TRL]

    def check(prompt: Prompt) -> None:
        """Raise ValueError if the row lacks a column that the function requires."""
        available = collect_columns(prompt)
        if missing := [name for name in columns if name not in available]:
            raise ValueError(
                f"no column {missing[0]!r}, which it requires (columns: {_join(list(available))}); the column of "
                'data.label_key is passed as ground_truth, or by its name with data.label_key=""'
            )

    def build(rollout: Rollout) -> dict[str, Any]:
        prompt, completion = split_messages(rollout)
        ids = [token for turn in rollout.turns[1:] for token in turn.token_ids.tolist()]
        texts: tuple[Any, ...] = (join_contents(prompt), join_contents(completion))
        values = (*(texts if as_text else ([*prompt], [*completion])), ids)
        arguments = collect_columns(rollout.prompt) | dict(zip(_TRL, values, strict=True))
        return {name: [value] for name, value in parameters.select(arguments).items()}

    def parse(result: Any) -> Any:
        reward = take_only(result)
        return Reward(0.0, {NOT_APPLICABLE: 1.0}) if reward is None else reward

    adapted = _make_function(function, build, parse)
    setattr(adapted, "check", check)  # noqa: B010  read by `functions.check_truths`
    return adapted


def _make_function(
    function: Callable[..., Any], build: Callable[[Rollout], dict[str, Any]], parse: Callable[[Any], Any]
) -> Callable[[Rollout], Any]:
    """Return a function of a rollout, or a coroutine function: `parse(function(**build(rollout)))`."""

    async def call_async(rollout: Rollout) -> Any:
        return parse(await function(**build(rollout)))

    def call(rollout: Rollout) -> Any:
        return parse(function(**build(rollout)))

    return call_async if plugins.is_async(function) else call


def split_messages(rollout: Rollout) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Split a conversation into prompt and response: the policy's messages and the tool results between them.

    The conversation of an agent, which need not begin with the row's messages, is split before the policy's first.
    """
    prompt, messages = rollout.prompt.messages, rollout.messages
    start = len(prompt)
    if not prompt or messages[:start] != prompt:
        roles = [message["role"] for message in messages]
        start = roles.index("assistant") if "assistant" in roles else len(roles)
    return messages[:start], messages[start:]


def join_contents(messages: Sequence[Message]) -> str:
    """Return the texts of messages, joined by line breaks."""
    return "\n".join(str(message.get("content") or "") for message in messages)


def collect_columns(prompt: Prompt) -> dict[str, Any]:
    """Return the row's columns as a TRL function gets them; one that is empty is left out."""
    columns = {"id": prompt.id, "data_source": prompt.data_source, "ground_truth": prompt.ground_truth}
    return prompt.extra | {name: value for name, value in columns.items() if value not in (None, "")}


def parse_verl_score(score: Any) -> Any:
    """Return a number unchanged, and a dict as a Reward: `score`, and its other numbers as parts.

    Raises RewardError for a dict without `score`.
    """
    if not isinstance(score, Mapping):
        return score
    if "score" not in score:
        raise RewardError(f"it returned a dict with {_join([str(name) for name in score])}, but without 'score'")
    return Reward(score["score"], {str(name): value for name, value in score.items() if _is_part(name, value)})


def _is_part(name: Any, value: Any) -> bool:
    """True for a further number beside `score`; texts such as verl's `pred` are no metrics."""
    try:
        parse_number(value, "")
    except RewardError:
        return False
    return bool(name != "score" and str(name))


def take_only(values: Any) -> Any:
    """Return the only element of a list, tuple or array. Raises RewardError for other values and lengths."""
    values = values.tolist() if getattr(values, "ndim", 0) else values
    if not isinstance(values, list | tuple):
        raise RewardError(f"it returned a {type(values).__name__}; it must return a list with a number per response")
    if len(values) != 1:
        raise RewardError(f"it returned {len(values)} values for 1 response")
    return values[0]


def _join(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
