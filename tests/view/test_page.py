"""The viewer page: its security policy, its data files, and generated text never executed."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from megarl.config import Config, ConfigError
from megarl.config.strict import list_keys
from megarl.view.page import load, select_rollouts, write_page
from megarl.view.page_server import Server
from megarl.view.rollout_files import Notes
from megarl.view.rollout_index import Index
from megarl.view.run_data import read_texts

sys.path.append(str(Path(__file__).resolve().parent))

import example_run  # noqa: E402

pytestmark = pytest.mark.alone
STATIC = Path(__file__).resolve().parents[2] / "megarl/view/static"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        example_run.write_run(folder / "first"),
        example_run.write_run(folder / "<b>second", last_response=(3, 5, 5), name=example_run.EVIL),
    ]
    file = folder / "page.html"
    write_page([load(run) for run in runs], file)
    return file


def test_page_allows_only_its_own_scripts(page: Path) -> None:
    text = page.read_text()
    rules = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert rules is not None
    policy = rules[1].replace("&#x27;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 16
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert example_run.EVIL not in text and "<img" not in text and text.count("<script") == text.count("</script>")
    assert not re.search(r"""(?:src|href)=["']?https?:""", text)


def test_scripts_do_not_build_html() -> None:
    folder = Path(__file__).resolve().parents[2] / "megarl" / "view" / "static"
    for file in folder.glob("*.js"):
        if not file.name.startswith("uPlot"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", file.read_text()
            )
    assert (
        "MIT" in (folder / "uPlot.LICENSE.txt").read_text() and "v1.6.32" in (folder / "uPlot.iife.min.js").read_text()
    )


def test_data_files_contain_json(page: Path) -> None:
    files = sorted(page.with_name("page_files").glob("tokens-*.js"))
    assert len(files) == 6
    for file in files:
        result = re.fullmatch(r'megarl\.receiveBlock\("([a-z0-9-]+)", (.*)\);\n', file.read_text())
        assert result is not None and result[1] == file.stem and not set("<>&") & set(result[2])
        assert [item["number"] for item in json.loads(result[2])] == [0, 2, 1, 3]


def test_selects_rollouts_with_token_data() -> None:
    steps = np.repeat(np.arange(1, 11), 100)
    columns = {"step": steps, "number": np.tile(np.arange(100), 10), "reward": np.tile(np.arange(100.0), 10)}
    index = Index(columns, {}, Notes())
    assert select_rollouts(index, 1000) == dict.fromkeys(range(1, 11))
    selected = select_rollouts(index, 360)
    assert selected[10] is None and selected[1] is None and selected[5] == {*range(10), *range(90, 100)}
    selected_few = select_rollouts(index, 40)
    assert None not in selected_few.values() and selected_few[5] == {0, 1, 98, 99}
    assert select_rollouts(index, 0) == {}


def render(address: str, folder: Path) -> str:
    """Return the DOM that a headless browser renders."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += ["--window-size=1400,1000", "--virtual-time-budget=8000", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("view", ["Rollouts", "Compare", "Prompts"])
def test_generated_text_is_never_executed(page: Path, view: str, tmp_path: Path) -> None:
    dom = render(f"{page.as_uri()}#{view}", tmp_path)
    assert "<title>MegaRL" in dom and "RAN</title>" not in dom and "<img" not in dom
    assert "data-ready" in dom and "&lt;img src=x onerror=" in dom  # present, as text


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_payload_executes_on_an_unsafe_page(tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(f"<title>MegaRL</title><script>'{example_run.EVIL}'</script>")
    assert "RAN</title>" in render((tmp_path / "bad.html").as_uri(), tmp_path / "profile")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_page_with_special_characters_finds_its_files(page: Path, tmp_path: Path) -> None:
    file = tmp_path / "a#1 %41?.html"
    write_page([load(page.parent / "first")], file)
    dom = render(f"{file.as_uri()}#Rollouts", tmp_path / "profile")
    assert "turn 1: policy, 3 tokens, weight version 2, 1 of 2 prefix tokens cached" in dom


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_draws_curves_and_times(page: Path, tmp_path: Path) -> None:
    assert render(page.as_uri(), tmp_path / "a").count('class="uplot') >= 2
    assert "generate 66.7 %" in render(f"{page.as_uri()}#Time", tmp_path / "b")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_overview_shows_bands_and_last_values(tmp_path: Path) -> None:
    runs = [example_run.write_run(tmp_path / "a"), example_run.write_run(tmp_path / "b", steps=2)]
    page = tmp_path / "page.html"
    write_page([load(run) for run in runs], page)
    watched = render(page.as_uri(), tmp_path / "one")
    assert ">5 outside 0.4 to 0.6<" in watched and ">last 0.75 and 0.5<" in watched
    assert 'title="a: last 0.75' in watched
    for run in runs:
        config = run / "config.yaml"
        config.write_text(config.read_text().replace("alarms: true", "alarms: false"))
    write_page([load(run) for run in runs], page)
    first_rendering = render(page.as_uri(), tmp_path / "two")
    assert ">last 0.7 and 0.7, typical 0.4 to 0.6<" in first_rendering and "5 outside" not in first_rendering


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize(
    ("query", "count"),
    [("reward<1", 3), ("not (reward<1) and prompt~p", 9), ("prompt='p0' or reward=3", 9), ("status!=stop", 0)],
)
def test_table_filters_rollouts(page: Path, query: str, count: int, tmp_path: Path) -> None:
    assert f"{count} of 12 rollouts" in render(f"{page.as_uri()}#Rollouts?{quote(query)}", tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_configuration_shows_keys_that_differ(page: Path, tmp_path: Path) -> None:
    runs = [example_run.write_run(tmp_path / name, steps=1) for name in ("a", "b")]
    config = runs[1] / "config.yaml"
    config.write_text(
        config.read_text()
        .replace("seed: 1", "seed: 7")
        .replace("algorithm: grpo", f"algorithm: {json.dumps(example_run.EVIL)}")
    )
    file = tmp_path / "page.html"
    write_page([load(run) for run in runs], file)
    dom = render(f"{file.as_uri()}#Configuration", tmp_path / "both")
    keys = re.findall(r"<tr[^>]*><td>([^<]+)</td><td>([^<]*)</td><td>([^<]*)</td></tr>", dom)
    assert ("run.seed", "1", "7") in keys and "RAN</title>" not in dom
    assert {key for key, _, _ in keys} == {"run.seed", "algorithm"}
    write_page([load(runs[1])], file)
    dom = render(f"{file.as_uri()}#Configuration", tmp_path / "one")
    assert "<td>guards.alarms</td><td>true</td>" in dom and "<td>run.num_rollout<" not in dom, "at its default"


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_files_show_log_and_code_as_text(page: Path, tmp_path: Path) -> None:
    run = example_run.write_run(tmp_path / "a", steps=1)
    (run / "code/lab").mkdir(parents=True)
    (run / "code/lab/reward.py").write_text(example_run.EVIL)
    (run / "log.txt").write_text(f"first line\n{'x' * 200_000}\n{example_run.EVIL}\n")
    assert [item["name"] for item in read_texts(run)] == ["log.txt", "code/lab/reward.py"]
    file = tmp_path / "page.html"
    write_page([load(run)], file)
    dom = render(f"{file.as_uri()}#Files", tmp_path / "files")
    assert "code/lab/reward.py</button>" in dom and "only the end of the file is shown" in dom
    assert "first line" not in dom and "RAN</title>" not in dom and "&lt;img src=x onerror=" in dom


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_metrics_over_hours_and_as_csv(tmp_path: Path) -> None:
    """A script is added to the page, whose policy would not admit it."""
    run = example_run.write_run(tmp_path / 'a,"b"', steps=2)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"time": 1000.0 + 1800 * row["step"]}) for row in rows]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    file = tmp_path / "page.html"
    write_page([load(run)], file)
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", file.read_text())
    script = """
        const axis = document.getElementById("x-axis");
        axis.value = "hours";
        axis.dispatchEvent(new Event("change"));
        megarl.formatMetrics().then((csv) => document.body.append(el("pre", { id: "csv" }, csv)));
    """
    file.write_text(
        text.replace(
            "</body>", f"<script>addEventListener('load', () => setTimeout(() => {{{script}}}, 500))</script></body>"
        )
    )
    dom = render(file.as_uri(), tmp_path / "profile")
    csv = re.search(r'<pre id="csv">([^<]*)</pre>', dom)
    assert csv is not None and ">hours<" in dom.partition('id="views"')[2] and 'class="u-label">step<' not in dom
    header, first, second = csv[1].split("\n")[:3]
    names = header.split(",")
    assert names[:3] == ["run", "step", "time"] and len(names) == 7
    values = dict(zip(names[1:], second.rpartition('"')[2][1:].split(","), strict=True))
    assert second.startswith('"a,""b"""') and values["step"] == "2" and values["time"] == "4600"
    assert values["rollout/reward_mean"] == "0.5" and first != second


@pytest.fixture
def server(page: Path) -> Iterator[Server]:
    with Server([page.parent / "first"]) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def get(server: Server, path: str, host: str | None = None) -> tuple[int, str]:
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_server_serves_requests_with_its_key(server: Server) -> None:
    status, text = get(server, f"/{server.key}/")
    assert status == 200 and 'id="block-overview"' in text
    status, text = get(server, f"/{server.key}/data/tokens-0-3-2.js?1")
    assert status == 200 and text.startswith('megarl.receiveBlock("tokens-0-3-2", [{') and '"number":2' in text
    assert get(server, f"/{server.key}/data/index-0.js")[0] == 200
    status, text = get(server, f"/{server.key}/data/texts-0.js?2")
    assert status == 200 and '"name":"log.txt"' in text
    status, text = get(server, f"/{server.key}/data/tokens-0-3-99.js")
    assert status == 200 and "there is no rollout 99 of step 3" in text


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/wrong-key-wrong-key-wrong-key/",
        "/KEY/data/index-7.js",
        "/KEY/data/texts-7.js",
        "/KEY/../page.html",
        "/KEY/x",
    ],
)
def test_server_rejects_other_paths(server: Server, path: str) -> None:
    assert get(server, path.replace("KEY", server.key))[0] == 404


def test_server_rejects_other_host_headers(server: Server) -> None:
    for host in ("evil.example", f"evil.example:{server.server_address[1]}", "127.0.0.1:1", "127.0.0.1"):
        assert get(server, f"/{server.key}/", host)[0] == 421
    assert get(server, f"/{server.key}/", f"localhost:{server.server_address[1]}")[0] == 200


def test_rejects_a_port_in_use(server: Server, page: Path) -> None:
    with pytest.raises(ConfigError, match="name another port"):
        Server([page.parent / "first"], server.server_address[1])


def test_page_names_existing_keys() -> None:
    config_keys = {name for name, _ in list_keys(Config())}
    texts = [file.read_text("utf-8") for file in (*STATIC.glob("*.js"), *STATIC.parent.glob("*.py"))]
    page_keys = {key for text in texts for key in re.findall(r"\btrack\.\w+", text)}
    assert page_keys and page_keys <= config_keys, page_keys - config_keys
