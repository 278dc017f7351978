"""A typical environment of the verifiers package: a data set, a rubric and two turns."""

import verifiers as vf
from datasets import Dataset


class TwoTurns(vf.MultiTurnEnv):  # type: ignore[misc]  # the package may be absent where types are checked
    """Repeat the request after the first answer."""

    async def env_response(self, messages, state, **kwargs):  # type: ignore[no-untyped-def]
        return [{"role": "user", "content": f"Again: {state['answer']}"}]


def load_environment(word: str = "hello", group: bool = False) -> vf.Environment:
    rows = [{"question": f"Say {word} {n}", "answer": f"{word} {n}", "info": {"number": n}} for n in range(3)]
    eval_rows = [{"question": f"Say {word} 9", "answer": f"{word} 9", "info": {"number": 9}}]

    async def exact(completion, answer, info) -> float:  # type: ignore[no-untyped-def]
        return float(completion[-1]["content"] == answer) + info["number"]

    def num_replies(completion) -> float:  # type: ignore[no-untyped-def]
        return float(sum(message["role"] == "assistant" for message in completion))

    async def best(completions) -> list[float]:  # type: ignore[no-untyped-def]
        return [0.0] * len(completions)

    rubric = vf.Rubric(funcs=[best] if group else [exact, num_replies], weights=[1.0] if group else [1.0, 0.0])
    data, eval_data = Dataset.from_list(rows), Dataset.from_list(eval_rows)
    return TwoTurns(dataset=data, eval_dataset=eval_data, system_prompt="Be brief.", rubric=rubric, max_turns=2)
