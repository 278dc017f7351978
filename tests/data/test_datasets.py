"""Reading, rendering and loading of prompts."""

import json
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from megarl.config import ConfigError
from megarl.data.datasets import read_prompts, render_prompts
from megarl.data.loader import PromptLoader
from megarl.types import Prompt

pytestmark = pytest.mark.alone

USER = ({"role": "user", "content": "hi"},)


def write_jsonl(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def prompts(count, prefix="p"):
    return [Prompt(id=f"{prefix}{i}", messages=USER, ground_truth=i) for i in range(count)]


# --- reading ----------------------------------------------------------------------------------------------------


def test_reads_verl_parquet(tmp_path):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{i} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(3)
    ]
    actual = read_prompts(write_parquet(tmp_path / "train.parquet", rows))
    assert [prompt.id for prompt in actual] == ["train-0", "train-1", "train-2"]
    assert actual[1] == Prompt(
        id="train-1",
        messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}),
        data_source="openai/gsm8k",
        ground_truth="2",
        extra={"ability": "math", "split": "train", "index": 1},
    )


def test_parquet_adds_no_null_fields_to_messages(tmp_path):
    messages = [
        {"role": "user", "content": "2 * 3?", "name": None},
        {"role": "assistant", "content": "5", "name": "solver"},
        {"role": "user", "content": "Well?", "name": None},
    ]
    path = write_parquet(tmp_path / "a.parquet", [{"prompt": messages, "ground_truth": 6}])
    assert read_prompts(path)[0].messages == (
        {"role": "user", "content": "2 * 3?"},
        {"role": "assistant", "content": "5", "name": "solver"},
        {"role": "user", "content": "Well?"},
    )


def test_prompt_may_be_json_text_of_messages(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]
    rows = [{"prompt": json.dumps(messages), "ground_truth": 5}]
    for path in (write_parquet(tmp_path / "a.parquet", rows), write_jsonl(tmp_path / "a.jsonl", *rows)):
        (actual,) = read_prompts(path)
        assert actual.messages == tuple(messages)
    for text in ("[1, 2]", "[]", "[x", '["role"]', '{"role": "user", "content": "x"}'):
        (actual,) = read_prompts(write_jsonl(tmp_path / "b.jsonl", {"prompt": text, "ground_truth": 5}))
        assert actual.messages == ({"role": "user", "content": text},)
    invalid_role = write_jsonl(
        tmp_path / "c.jsonl", {"prompt": json.dumps([{"role": "boss", "content": "x"}]), "label": 5}
    )
    with pytest.raises(ConfigError, match="message 0 of 'prompt' has the unknown role 'boss'"):
        read_prompts(invalid_role)


def test_reads_jsonl(tmp_path):
    schema = {"type": "function", "function": {"name": "search", "parameters": {}}}
    path = write_jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "hi", "ground_truth": 7, "tools": ["calculator"], "id": "first", "metadata": {"level": 2}},
        "\n",
        {"messages": list(USER), "label": "x", "data_source": "here", "tools": [schema], "note": "n", "id": 5},
        {"prompt": "hi", "label": 0, "tools": "calculator"},
    )
    actual = read_prompts(path)
    assert actual[0] == Prompt(id="first", messages=USER, ground_truth=7, tools=("calculator",), extra={"level": 2})
    assert actual[1] == Prompt(
        id="5", messages=USER, ground_truth="x", data_source="here", tools=("search",), extra={"note": "n"}
    )
    assert actual[2] == Prompt(id="a-2", messages=USER, ground_truth=0, tools=("calculator",))


def test_reads_slime_rows(tmp_path):
    row = {"input": "hi", "label": "42", "metadata": {"rm_type": "math"}, "tools": '[{"name": "calculator"}]'}
    actual = read_prompts(write_jsonl(tmp_path / "a.jsonl", row), prompt_key="input", label_key="label")
    assert actual == [
        Prompt(id="a-0", messages=USER, ground_truth="42", tools=("calculator",), extra={"rm_type": "math"})
    ]


def test_ground_truth_is_optional_without_label_key(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "hi"})
    assert read_prompts(path, label_key="")[0].ground_truth is None
    null = write_jsonl(tmp_path / "b.jsonl", {"prompt": "hi", "reward_model": {"ground_truth": None}})
    assert read_prompts(null, label_key="")[0].ground_truth is None
    with pytest.raises(ConfigError, match="no 'ground_truth'; columns here: prompt; set data.label_key"):
        read_prompts(path)


GOOD = {"prompt": "hi", "ground_truth": 1}
BAD_LINES = {
    "malformed": ('{"prompt": "hi",\n', r"a\.jsonl:2: not JSON: Expecting property name"),
    "not an object": ("[1]\n", r"a\.jsonl:2: a list, not an object"),
    "no prompt": ({"question": "hi", "ground_truth": 1}, r"a\.jsonl:2: no 'prompt'; columns here: question, ground_tr"),
    "empty prompt": ({"prompt": None, "ground_truth": 1}, "no 'prompt'; the column 'prompt' is empty here"),
    "no label": ({"prompt": "hi", "answer": 1}, r"a\.jsonl:2: no 'ground_truth'; columns here: prompt, answer"),
    "prompt is a number": ({"prompt": 5, "ground_truth": 1}, "must be text or a list of chat messages, not '5'"),
    "no messages": ({"prompt": [], "ground_truth": 1}, "must be text or a list of chat messages"),
    "no role": ({"prompt": [{"content": "hi"}], "ground_truth": 1}, "not a message with role and content"),
    "null in reward_model": (
        {"prompt": "hi", "reward_model": {"ground_truth": None}},
        "reward_model.ground_truth is emp",
    ),
    "NaN": ('{"prompt": "hi", "ground_truth": NaN}\n', "no 'ground_truth'; the column 'ground_truth' is empty here"),
    "ends with a response": (
        {"prompt": [*USER, {"role": "assistant", "content": "x"}], "label": 1},
        "nothing to answer",
    ),
    "id is a list": (GOOD | {"id": [1]}, r"'id' must be text or a number, not '\[1\]'"),
    "source is an object": (GOOD | {"data_source": {}}, "'data_source' must be text"),
    "bad tool": (GOOD | {"tools": [{"parameters": {}}]}, "neither a name nor a tool schema"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_invalid_lines_raise(tmp_path, name):
    line, message = BAD_LINES[name]
    with pytest.raises(ConfigError, match=message):
        read_prompts(write_jsonl(tmp_path / "a.jsonl", GOOD, line))


def test_invalid_utf8_raises(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: not UTF-8 at byte 12; convert the file"):
        read_prompts(path)


def test_duplicate_ids_raise_with_both_places(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", GOOD | {"id": "x"}, GOOD | {"id": "y"}, GOOD | {"id": "x"})
    with pytest.raises(ConfigError, match=r"a\.jsonl:3: the id 'x' is already used by .*a\.jsonl:1;"):
        read_prompts(path)


def test_invalid_files_raise(tmp_path):
    with pytest.raises(ConfigError, match="no data file .*nowhere.jsonl; check data.train"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="is a folder; name a .parquet or .jsonl file"):
        read_prompts(tmp_path)
    with pytest.raises(ConfigError, match="'.csv' is not known; data files are .parquet or .jsonl"):
        read_prompts(write_jsonl(tmp_path / "a.csv", GOOD))
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(write_jsonl(tmp_path / "a.jsonl", "\n"))
    with pytest.raises(ConfigError, match="cannot be read as parquet"):
        read_prompts(write_jsonl(tmp_path / "a.parquet", GOOD))


def test_invalid_parquet_raises(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.parquet, row 0: no 'prompt'; columns here: text, ground_truth; set"):
        read_prompts(write_parquet(tmp_path / "a.parquet", [{"text": "hi", "ground_truth": 1}]))
    empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(empty, tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match="b.parquet holds no prompts"):
        read_prompts(tmp_path / "b.parquet")


# --- rendering --------------------------------------------------------------------------------------------------


def test_long_prompts_are_dropped_and_counted():
    all_prompts = prompts(5)
    kept_prompts, num_dropped = render_prompts(
        all_prompts, lambda prompt: list(range(prompt.ground_truth)), max_prompt_tokens=3
    )
    assert [(prompt.id, prompt.token_ids.tolist()) for prompt in kept_prompts] == [
        ("p0", []),
        ("p1", [0]),
        ("p2", [0, 1]),
        ("p3", [0, 1, 2]),
    ]
    assert num_dropped == 1
    assert not any(len(prompt.token_ids) for prompt in all_prompts)


def test_dropping_all_prompts_raises():
    with pytest.raises(ConfigError, match="all 2 prompts are longer than 3 tokens, the shortest has 8; raise"):
        render_prompts(prompts(2), lambda prompt: [0] * (9 - prompt.ground_truth), max_prompt_tokens=3)


# --- loading ----------------------------------------------------------------------------------------------------


def next_batch_ids(loader, batches):
    return [[prompt.id for prompt in loader.next_batch()] for _ in range(batches)]


def test_loads_in_order_across_epochs():
    loader = PromptLoader(prompts(5), 2, seed=1, shuffle=False)
    assert next_batch_ids(loader, 4) == [["p0", "p1"], ["p2", "p3"], ["p4", "p0"], ["p1", "p2"]]
    assert PromptLoader(prompts(2), 5, seed=1, shuffle=False).next_batch()[4].id == "p0"


def test_epochs_have_every_prompt_once_in_different_orders():
    all_ids = {f"p{i}" for i in range(12)}
    loader = PromptLoader(prompts(12), 4, seed=1)
    epochs = [sum(next_batch_ids(loader, 3), []), sum(next_batch_ids(loader, 3), [])]
    assert set(epochs[0]) == set(epochs[1]) == all_ids
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0], key=lambda name: int(name[1:]))
    assert sum(next_batch_ids(PromptLoader(prompts(12), 4, seed=1), 3), []) == epochs[0]
    assert sum(next_batch_ids(PromptLoader(prompts(12), 4, seed=2), 3), []) != epochs[0]


def test_shuffle_order_is_pinned():
    # Pinned, because a change of the shuffle would break resumed runs.
    assert next_batch_ids(PromptLoader(prompts(6), 6, seed=1), 1) == [["p2", "p1", "p0", "p4", "p3", "p5"]]


@pytest.mark.parametrize("steps", range(8))
def test_state_resumes_at_the_same_position(steps):
    loader = PromptLoader(prompts(7), 3, seed=5)
    next_batch_ids(loader, steps)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["samples"] == 3 * steps
    resumed = PromptLoader(prompts(7), 3, seed=5)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert next_batch_ids(resumed, 6) == next_batch_ids(loader, 6)


def test_is_last_batch():
    loader = PromptLoader(prompts(7), 3, seed=5)
    assert not loader.is_last_batch([])
    first, second = loader.next_batch(), loader.next_batch()
    assert loader.is_last_batch(second) and loader.is_last_batch(second[1:]) and loader.is_last_batch(tuple(second))
    assert not any(map(loader.is_last_batch, ([], first, second[:2], [*first, *second], [replace(second[2])])))
    loader.items_at(0, 2)
    assert loader.is_last_batch(second)


@pytest.mark.parametrize("state_prompts", [prompts(6), prompts(8), prompts(7, "q"), prompts(7)[::-1]])
def test_state_of_other_prompts_raises(state_prompts):
    state = PromptLoader(prompts(7), 3, seed=5).state_dict()
    with pytest.raises(ConfigError, match="other training prompts"):
        PromptLoader(state_prompts, 3, seed=5).load_state_dict(state)


def test_changed_file_sizes_raise_unless_forced():
    """Beyond 1,000 rows, the fingerprint samples rows, so file sizes count too."""
    many_prompts = prompts(3000)
    saved = PromptLoader(many_prompts, 3, seed=5, file_sizes=(70_000,))
    saved.next_batch()
    changed = [*many_prompts[:1], replace(many_prompts[1], ground_truth="other"), *many_prompts[2:]]
    loader = PromptLoader(changed, 3, seed=5, file_sizes=(70_004,))
    with pytest.raises(ConfigError, match="other training prompts .* run.resume=forced"):
        loader.load_state_dict(saved.state_dict())
    loader.load_state_dict(saved.state_dict(), forced=True)
    assert [prompt.id for prompt in loader.next_batch()] == [prompt.id for prompt in saved.next_batch()]


def test_empty_data_raises():
    with pytest.raises(ConfigError, match="no prompts"):
        PromptLoader([], 3, seed=1)


def test_items_are_read_lazily():
    class Lazy(list):
        indices: list[int] = []

        def __getitem__(self, index):
            self.indices.append(index)
            return super().__getitem__(index)

    loader = PromptLoader(Lazy(prompts(100)), 2, seed=1, shuffle=False)
    loader.next_batch()
    assert Lazy.indices == [0, 1]
