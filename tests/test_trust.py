"""All places in the source that could execute untrusted code are listed here, with the reason why they are safe."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    str(path.relative_to(ROOT)): path
    for folder in ("megarl", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
CODE = {"eval", "exec", "execfile", "os.system", "os.popen", "asyncio.create_subprocess_shell"}
PICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "ForkingPickler")
COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}

ALLOWED = {
    ("megarl/parallel/job_secret.py", "pickle.loads"): (1, "behind a keyed hash that only ranks of the job can make"),
    ("megarl/parallel/encoding.py", "pickle.Unpickler"): (1, "behind the same hash, and calls nothing but its table"),
    ("megarl/rewards/reward_process.py", "pickle.loads"): (
        1,
        "what a rank hands to its own child by an inherited socket; answers are JSON",
    ),
    ("megarl/environments/environment_process.py", "pickle.loads"): (2, "what a rank hands to its own child, likewise"),
    ("megarl/megatron/dist_checkpoint.py", "dist.gather_object"): (
        1,
        "behind the same hash, as Megatron's saves",
    ),
    ("megarl/checkpoint/dist_checkpoint_reader.py", "pickle.Unpickler"): (1, "finds no class but those that it lists"),
    ("megarl/rehearse/rehearsal.py", "pickle.loads"): (1, "what its own child has written to a folder of this user"),
    ("megarl/rewards/code/answering.py", "exec"): (4, "a policy's program, in the sandbox"),
    ("megarl/rewards/code/answering.py", "eval"): (1, "a test of a data set, in the sandbox"),
    ("megarl/rewards/code/judging.py", "exec"): (2, "tests of a data set, in a sandbox of their own"),
    ("megarl/sandbox/inside_harness.py", "exec"): (1, "in the sandbox"),
    ("megarl/sandbox/inside_session.py", "exec"): (1, "the policy's code, in the sandbox"),
    ("megarl/sandbox/inside_session.py", "eval"): (1, "the policy's code, in the sandbox"),
    ("tools/make_quickstart.py", "eval"): (1, "sums that the tool has made itself, without builtins"),
}


def keyword(node: ast.Call, name: str) -> ast.expr | None:
    return next((kw.value for kw in node.keywords if kw.arg == name), None)


def is_true(node: ast.expr | None) -> bool:
    return node is not None and not (isinstance(node, ast.Constant) and not node.value)


def dangerous_calls(source: str) -> list[str]:
    """Return the calls and base classes in a source that execute or unpickle their input."""
    result = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            result += [base for base in map(ast.unparse, node.bases) if base.rpartition(".")[2] == "Unpickler"]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        module, _, function_name = name.rpartition(".")
        if name in CODE or function_name in COLLECTIVES:
            result.append(name)
        elif module.rpartition(".")[2] in PICKLES and function_name in ("load", "loads", "Unpickler", "open"):
            result.append(name)
        elif function_name == "recv_pyobj" or (function_name == "read_pickle"):
            result.append(name)
        elif name == "torch.load" and not (
            isinstance(weights_only := keyword(node, "weights_only"), ast.Constant) and weights_only.value is True
        ):
            result.append(name)
        elif module == "yaml" and function_name in ("load", "load_all", "full_load", "unsafe_load"):
            result.append(name)
        elif is_true(keyword(node, "shell")):
            result.append(f"{name}(shell=True)")
        elif is_true(keyword(node, "allow_pickle")):
            result.append(f"{name}(allow_pickle=True)")
        elif is_true(keyword(node, "trust_remote_code")):
            result.append(f"{name}(trust_remote_code=True)")
    return result


def test_only_allowed_places_execute_or_unpickle() -> None:
    counts = Counter(
        (name, call) for name, path in FILES.items() for call in dangerous_calls(path.read_text(encoding="utf-8"))
    )
    assert counts == {call_site: count for call_site, (count, _) in ALLOWED.items()}
    assert all(reason for _, reason in ALLOWED.values())


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("pickle.load(file)", "pickle.load"),
        ("import dill\ndill.loads(x)", "dill.loads"),
        ("torch.load(file)", "torch.load"),
        ("torch.load(file, weights_only=False)", "torch.load"),
        ("torch.load(file, weights_only=flag)", "torch.load"),
        ("yaml.load(file, Loader=L)", "yaml.load"),
        ("eval(text)", "eval"),
        ("exec(text)", "exec"),
        ("os.system(text)", "os.system"),
        ("subprocess.run(text, shell=True)", "subprocess.run(shell=True)"),
        ("np.load(file, allow_pickle=True)", "np.load(allow_pickle=True)"),
        ("AutoModel.from_pretrained(x, trust_remote_code=flag)", "AutoModel.from_pretrained(trust_remote_code=True)"),
        ("socket.recv_pyobj()", "socket.recv_pyobj"),
        ("dist.all_gather_object(a, b)", "dist.all_gather_object"),
        ("class A(pickle.Unpickler): pass", "pickle.Unpickler"),
    ],
)
def test_detects_dangerous_calls(source: str, call: str) -> None:
    assert dangerous_calls(source) == [call]


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "torch.load(file, weights_only=True)",
        "json.loads(text)",
        "yaml.safe_load(text)",
        "pickle.dumps(x)",
        "np.load(file, allow_pickle=False)",
        "pickletools.genops(data)",
    ],
)
def test_ignores_harmless_calls(source: str) -> None:
    assert dangerous_calls(source) == []
