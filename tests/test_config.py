"""Configuration files, overrides, ranges of values and error messages."""

import ast
import dataclasses
from math import inf, nan
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

import megarl.config
from megarl.config import (
    AUTO_KEYS,
    RENAMED_KEYS,
    RENAMED_VALUES,
    Config,
    ConfigError,
    describe_keys,
    from_dict,
    load_config,
    strict,
    to_dict,
)
from megarl.config.stages import config_of_step

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parent.parent


def test_defaults_match_common_practice():
    config = Config()
    assert (config.advantage.gamma, config.advantage.lam) == (1.0, 0.95)
    assert (config.loss.clip, config.loss.dual_clip, config.loss.value_clip) == (0.2, 3.0, 0.2)
    assert (config.kl.coef, config.kl.target) == (0.001, 0.015)
    assert (config.actor_optimizer.lr, config.actor_optimizer.warmup_fraction) == (1e-6, 0.1)
    assert (config.actor_optimizer.schedule, config.actor_optimizer.max_grad_norm) == ("cosine", 1.0)
    assert (config.rollout.max_turns, config.rollout.tool_timeout) == (5, 30)


def test_keys_are_unique():
    keys = [name for name, _ in describe_keys()]
    assert len(keys) == len(set(keys))


def test_synonyms_point_to_existing_keys():
    keys = {name for name, _ in describe_keys()}
    assert set(megarl.config.SYNONYMS.values()) <= keys
    with pytest.raises(ConfigError, match=r"unknown key train.LEARNING_RATE; did you mean actor_optimizer.lr\?"):
        from_dict({"train": {"LEARNING_RATE": 1.0}})
    with pytest.raises(ConfigError, match=r"unknown key rollout.n; did you mean rollout.samples_per_prompt\?"):
        from_dict({"rollout": {"n": 8}})


def test_a_suggestion_replaces_the_list_of_keys():
    for tree, message in (
        ({"run": {"sed": 1}}, "unknown key run.sed; did you mean run.seed? (megarl train --keys run lists more)"),
        ({"rolout": {}}, "unknown key rolout; did you mean rollout?"),
    ):
        with pytest.raises(ConfigError) as error:
            from_dict(tree)
        assert str(error.value) == message


def test_every_key_is_documented():
    """Each field in config/ is followed by a docstring, or is a section."""
    files = sorted(Path(megarl.config.__file__).parent.glob("*.py"))
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name.endswith("Config")]
    sections = {node.name for node in classes}
    documented, without_docs = 0, set()
    for cls in classes:
        for node, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign):
                continue
            if isinstance(after, ast.Expr) and isinstance(ast.literal_eval(after.value), str):
                documented += 1
            elif ast.unparse(node.annotation) not in sections:
                without_docs.add(ast.unparse(node.target))
    assert not without_docs
    assert documented > 50  # the search found the keys


@pytest.mark.parametrize("old", [key for key in RENAMED_KEYS if key.count(".") == 1])
def test_renamed_key_names_its_replacement(old: str) -> None:
    (section, key), new = old.split("."), RENAMED_KEYS[old]
    assert new in dict(describe_keys())
    with pytest.raises(ConfigError, match=rf"^unknown key {old}: MegaRL 0.2 renamed it to {new}$"):
        from_dict({section: {key: 1}})


def test_renamed_value_names_its_replacement() -> None:
    for value, new in RENAMED_VALUES["loss.agg_mode"].items():
        with pytest.raises(ConfigError, match=rf"^loss.agg_mode={value}: MegaRL 0.2 renamed this value to {new}$"):
            from_dict({"loss": {"agg_mode": value}})


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path):
    assert isinstance(load_config(path), Config)


RECIPE_CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if not path.name.startswith("quickstart")]


@pytest.mark.parametrize("path", RECIPE_CONFIGS, ids=lambda path: path.stem)
def test_recipe_header_lists_differences_from_its_source(path):
    header = path.read_text().partition("\nalgorithm:")[0]
    assert ("Differences:" in header) != ("The values are ours" in header)
    if "Differences:" in header:
        assert len([line for line in header.splitlines() if line.startswith("# - ")]) >= 3


def test_recipes_match_their_sources():
    """Recipes set the values of verl and torch where defaults differ: AdamW, warm-up, evaluation and rewards."""
    gsm8k, dapo, r1, tulu = (
        load_config(ROOT / f"configs/{name}.yaml")
        for name in ("ppo_gsm8k", "qwen2.5_32b_dapo", "deepseek_r1", "llama3_70b")
    )
    for optimizer in (gsm8k.actor_optimizer, gsm8k.critic.optimizer):
        assert (optimizer.warmup_fraction, optimizer.beta2, optimizer.weight_decay) == (0.0, 0.999, 0.01)
    for optimizer in (tulu.actor_optimizer, tulu.critic.optimizer):
        assert (optimizer.warmup_fraction, optimizer.beta2, optimizer.weight_decay) == (0.1, 0.999, 0.01)
    assert tulu.reward.weights == {"math_verify": 10.0} and tulu.kl.coef == 0.07
    eval_config = dapo.rollout.eval_config
    assert (eval_config.temperature, eval_config.top_p, dapo.rollout.top_p) == (1.0, 0.7, 1.0)
    assert (dapo.actor_optimizer.beta2, dapo.actor_optimizer.weight_decay) == (0.999, 0.1)
    assert r1.actor_optimizer.warmup_fraction == 0.0
    assert [name.partition(":")[2] for name in r1.reward.functions] == [
        *("by_source", "format_reward", "language_consistency")
    ]
    # 16 updates a step: 400 updates are 25 steps, and 8,200 are 512.5.
    assert (r1.run.num_update, r1.data.prompts_per_step, r1.rollout.samples_per_prompt) == (16, 16 * 32, 16)
    assert (r1.kl.refresh_reference_every, r1.kl.coef, r1.actor_optimizer.lr) == (25, 0.001, 3e-6)
    lengths = {step: config_of_step(r1, step).rollout.max_new_tokens for step in (1, 512, 513, 650)}
    assert lengths == {1: 32768, 512: 32768, 513: 65536, 650: 65536}


def test_config_round_trips():
    rollout = {"tools": ["a:b"], "sglang": {"mem_fraction_static": 0.5}}
    config = from_dict({"algorithm": "grpo", "rollout": rollout, "kl": {"target": None}})
    assert from_dict(to_dict(config)) == config != Config()
    assert from_dict(yaml.safe_load(yaml.safe_dump(to_dict(config)))) == config


def write_config(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return path


def test_overrides_win_over_the_file(tmp_path):
    path = write_config(tmp_path, "run: {dir: runs/a, seed: 3}\nparallel:\n  tp: 2\n")
    overrides = ["parallel.ep=2", "run.seed=4", "actor_optimizer.lr=1e-4", "kl.target=null", "algorithm=grpo"]
    config = load_config(path, overrides)
    assert (config.run.dir, config.run.seed, config.parallel.tp, config.parallel.ep) == ("runs/a", 4, 2, 2)
    assert (config.actor_optimizer.lr, config.kl.target, config.algorithm) == (1e-4, None, "grpo")
    assert load_config(path, ["critic.optimizer.lr=3e-5"]).critic.optimizer.lr == 3e-5
    assert load_config(path, ["reward.functions=[a:b, c:d]"]).reward.functions == ("a:b", "c:d")
    assert load_config(path, ["reward.functions=a:b"]).reward.functions == ("a:b",)
    assert load_config(path, ["model.megatron.moe_grouped_gemm=true"]).model.megatron == {"moe_grouped_gemm": True}
    assert load_config(path, ["run.dir=a=b"]).run.dir == "a=b"


def test_empty_file_gives_defaults(tmp_path):
    assert load_config(write_config(tmp_path, "")) == Config()


def test_partial_section_keeps_its_defaults():
    """The critic keeps its own learning rate if other keys of its optimizer are set."""
    optimizer = from_dict({"critic": {"optimizer": {"schedule": "constant"}}}).critic.optimizer
    assert (optimizer.lr, optimizer.schedule) == (1e-5, "constant") and Config().actor_optimizer.lr == 1e-6
    assert from_dict({"critic": {"optimizer": None}}) == from_dict({"critic": None}) == Config()


def test_converts_numbers():
    assert from_dict({"actor_optimizer": {"lr": "1e-6"}}).actor_optimizer.lr == 1e-6  # YAML 1.1 parses it as text
    assert from_dict({"advantage": {"gamma": 1}}).advantage.gamma == 1.0
    assert from_dict({"run": {"num_rollout": 1e3}}).run.num_rollout == 1000


BAD_VALUES = {
    "misspelt key": ({"run": {"sed": 1}}, r"unknown key run\.sed; did you mean run\.seed\?"),
    "misspelt section": ({"rolout": {}}, r"unknown key rolout; did you mean rollout\?"),
    "key of another section": ({"run": {"lam": 1}}, r"unknown key run\.lam; did you mean advantage\.lam\?"),
    "unknown key": ({"run": {"qqqq": 1}}, r"unknown key run\.qqqq \(known here: dir, seed"),
    "nested key": ({"critic": {"optimizer": {"l": 1}}}, r"unknown key critic\.optimizer\.l; did you mean critic\.opt"),
    "text for int": ({"run": {"seed": "one"}}, r"run\.seed must be a whole number, at least 0 and .*, not 'one'"),
    "bool for int": ({"run": {"seed": True}}, r"run\.seed must be a whole number, at least 0 and .*, not True"),
    "fraction for int": ({"run": {"seed": 1.5}}, r"run\.seed must be a whole number, at least 0 and .*, not 1\.5"),
    "null for int": ({"run": {"seed": None}}, r"run\.seed must be a whole number, at least 0 and .*, not None"),
    "text for float": ({"advantage": {"lam": "high"}}, r"advantage\.lam must be a number, at least 0 .*, not 'high'"),
    "bool for float": ({"advantage": {"lam": False}}, r"advantage\.lam must be a number, at least 0 and .*, not False"),
    "text for optional": ({"kl": {"target": "low"}}, r"kl\.target must be a number, above 0 .*, or null, not 'low'"),
    "int for bool": ({"run": {"export": 1}}, r"run\.export must be true or false, not 1"),
    "int for text": ({"run": {"dir": 1}}, r"run\.dir must be text, not 1"),
    "choice": (
        {"kl": {"apply_to": "rewards"}},
        r"kl\.apply_to must be one of reward, loss, none, not 'rewards'; did you mean reward\?",
    ),
    "number for list": ({"reward": {"functions": 3}}, r"reward\.functions must be a list of text, not 3"),
    "number in list": ({"reward": {"functions": [3]}}, r"reward\.functions\[0\] must be text, not 3"),
    "list for mapping": ({"rollout": {"sglang": [1]}}, r"rollout\.sglang must be a mapping, not \[1\]"),
    "list for weights": (
        {"reward": {"weights": [1]}},
        r"must be a mapping, not \[1\]; write \{right: 1, short: 0\.1\}.* environment's is environment",
    ),
    "value for section": ({"run": 3}, r"run must be a section of keys, not 3"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_rejects_bad_values(name):
    tree, message = BAD_VALUES[name]
    with pytest.raises(ConfigError, match=message) as error:
        from_dict(tree)
    assert "\n" not in str(error.value)


SECTIONS = {name.rpartition(".")[0] for name, _ in describe_keys()} - {""}
ODD_VALUES = [nan, inf, -inf, -1, 0, 1e400, 10**30, -(10**5000), 2**63, True, "", "x", [], {}, None, [nan], {"a": nan}]


def nest_value(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def get_value(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def replace_key(config: Any, name: str, value: Any) -> Any:
    section, _, key_path = name.partition(".")
    return dataclasses.replace(
        config, **{section: replace_key(getattr(config, section), key_path, value) if key_path else value}
    )


# tests/controllers/test_controller.py tests the values of `algorithm`.
@pytest.mark.parametrize("name", [name for name, _ in describe_keys() if name != "algorithm"])
def test_every_key_accepts_exactly_its_range(name):
    kind = strict.collect_key_types(Config)[name]
    base, within, optional = strict._split_type(kind)
    assert base not in (int, float) or str(within), f"{name} has no range"
    assert strict.is_valid(get_value(Config(), name), kind)
    for value in ODD_VALUES:
        if name == "parallel.auto" and value is True:
            continue  # short for a list, see `test_auto_lists_the_keys_that_nothing_sets`
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        accepted = {
            bool: isinstance(value, bool),
            dict: value == {},
            str: value in ("x", "") or value is None,
            int: is_number and isinstance(value, int) and value in within,
            float: is_number and abs(value) < 1e300 and value in within,
        }.get(get_origin(base) or base, value in ("x", []))
        if get_origin(base) is tuple:
            item = get_args(base)[0]
            accepted = value in (None, "", []) or (value == "x" and str in (item, *get_args(item)))
        accepted = (accepted and get_origin(base) is not Literal) or (optional and value is None)
        for argument in (
            lambda value=value: from_dict(nest_value(name, value)),
            lambda value=value: build_config(name, value),
        ):
            try:
                selected = argument()
            except ConfigError as error:
                assert not accepted, (name, value)
                assert "\n" not in str(error) and str(error).startswith(name) and len(str(error)) < 300
            else:
                assert accepted, (name, value)
                assert isinstance(selected, Config)


def build_config(name: str, value: Any) -> Config:
    """Return a configuration built in Python, without conversion of values."""
    base, _, _ = strict._split_type(strict.collect_key_types(Config)[name])
    if value is None and base is str:
        value = ""
    if get_origin(base) is tuple and (value is None or isinstance(value, str)):
        value = (value,) if value else ()
    config = replace_key(Config(), name, value)
    strict.check_dataclass(config)
    return config


def test_rejects_values_for_sections():
    for section in SECTIONS:
        for value in (3, nan, "x", [], True):
            with pytest.raises(ConfigError, match=rf"^{section} must be a section of keys, not "):
                from_dict(nest_value(section, value))
            with pytest.raises(ConfigError, match=rf"^{section} must be a \w+Config, not "):
                strict.check_dataclass(replace_key(Config(), section, value))


def test_passthrough_mappings_must_be_plain_data():
    for value in ({"a": {"b": nan}}, {"a": [inf]}, {1: 2}, {"a": 2**70}, {"a": object()}, {"a": "\ud83d"}):
        for name in ("rollout.sglang", "model.megatron", "train.ddp", "critic.parallel"):
            with pytest.raises(ConfigError, match=rf"^{name}"):
                from_dict(nest_value(name, value))
    accepted = {"a": [1, 0.5, None, True, {"b": "text\nof two lines"}]}
    assert from_dict({"rollout": {"sglang": accepted}}).rollout.sglang == accepted


def test_rejects_bad_files_and_overrides(tmp_path):
    with pytest.raises(ConfigError, match="no configuration file nowhere.yaml"):
        load_config("nowhere.yaml")
    with pytest.raises(ConfigError, match="a.yaml is not valid YAML"):
        load_config(write_config(tmp_path, "run: {dir: "))
    with pytest.raises(ConfigError, match="a.yaml holds a list, not a mapping"):
        load_config(write_config(tmp_path, "- run\n"))
    path = write_config(tmp_path, "run: {seed: 1}\n")
    with pytest.raises(ConfigError, match="override 'run.seed' is not of the form key=value"):
        load_config(path, ["run.seed"])
    with pytest.raises(ConfigError, match="seed is a value, not a section"):
        load_config(path, ["run.seed.x=1"])
    with pytest.raises(ConfigError, match=r"unknown key run\.sed; did you mean run\.seed"):
        load_config(path, ["run.sed=1"])


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().run.seed = 2  # type: ignore[misc]


def test_auto_lists_the_keys_that_nothing_sets(tmp_path: Path) -> None:
    every = AUTO_KEYS

    def auto(tree: dict[str, Any]) -> tuple[str, ...]:
        config = from_dict(tree)
        assert from_dict(to_dict(config)) == config
        return config.parallel.auto

    assert auto({"parallel": "auto"}) == auto({"parallel": {"auto": True}}) == every
    assert auto({}) == auto({"parallel": {"auto": False, "tp": 2}}) == ()
    assert auto({"parallel": {"auto": ["tp", "ep"], "ep": 2}}) == ("tp", "ep")
    tree = {"parallel": {"auto": True, "pp": 1, "world_size": 8}, "rollout": {"tp": 2}}
    tree |= {"model": {"megatron": {"recompute_granularity": "full", "bias_dropout_fusion": False}}}
    fixed = {"pp", "world_size", "rollout.tp", "recompute"}
    assert auto(tree) == tuple(key for key in every if key not in fixed)

    file = tmp_path / "c.yaml"
    file.write_text("parallel: {world_size: 4, ranks_per_node: 2, ranks_per_gpu: 2, gpu_gb: 80, tp: 2, ep: 2}\n")
    sizes = ("tp", "pp", "vpp", "cp", "ep", "etp")
    # Without a key, the sizes of the file are replaced, not those of the job; with it they are fixed.
    parallel = load_config(file, ["parallel=auto", "parallel.pp=2"]).parallel
    assert (parallel.world_size, parallel.ranks_per_node, parallel.ranks_per_gpu, parallel.gpu_gb) == (4, 2, 2, 80)
    assert (parallel.tp, parallel.pp, parallel.ep) == (1, 2, 1)
    assert [key for key in sizes if key not in parallel.auto] == ["pp"]
    parallel = load_config(file, ["parallel.auto=true"]).parallel
    assert (parallel.tp, parallel.ep) == (2, 2) and not {"tp", "ep"} & set(parallel.auto)
    file.write_text("parallel: auto\n")
    assert load_config(file, ["parallel.world_size=4"]).parallel.auto == every[1:]
    for text in ("parallel=none", "parallel.auto=[tp, dp]", "parallel.auto=3", "parallel={auto: all}"):
        with pytest.raises(ConfigError, match="parallel"):
            load_config(file, [text])
    file.write_text("parallel: all\n")
    with pytest.raises(ConfigError, match="parallel must be a section of keys, not 'all'"):
        load_config(file)
