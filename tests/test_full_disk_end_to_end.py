"""Training continues, and posts alarms, while the disk is too full for checkpoints, logs and rollouts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from training_run import ENVIRONMENT, ROOT, build_command, make_folder

pytestmark = pytest.mark.nightly

CHECKPOINT, OTHER_FILE = "could not write checkpoint", "training continues without"


class WebhookServer:
    """Collects alarms; frees the disk once it has one about a checkpoint and one about another file."""

    def __init__(self, flag: Path) -> None:
        self.alarms: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.alarms.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()
                texts = [alarm["alarm"] for alarm in outer.alarms]
                if all(any(part in text for text in texts) for part in (CHECKPOINT, OTHER_FILE)):
                    flag.touch()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_training_continues_while_the_disk_is_full(tmp_path: Path) -> None:
    folder, disk, flag = make_folder(tmp_path / "q", "qwen3_moe"), tmp_path / "disk", tmp_path / "flag"
    disk.mkdir()
    hook = WebhookServer(flag)
    settings = ["algorithm=grpo", "run.num_rollout=8", "run.export=false", "track.webhook=env:HOOK"]
    command = build_command(folder, disk / "run", *settings)
    environment = ENVIRONMENT | {"HOOK": hook.url, "MEGARL_WEBHOOK_PRIVATE": "1"}
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "tests/full_disk.py", str(disk), "200", str(flag), *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    hook.close()
    if "unshare: " in done.stderr or "NO MOUNT" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert result["full"] and flag.exists(), result["output"][-3000:]
    assert result["status"] == 0, result["output"][-3000:]
    # All steps ran, the last checkpoints exist, and no partial checkpoint is left.
    assert result["checkpoints"] == ["latest", "step_000006", "step_000007", "step_000008"], result["output"][-3000:]
    assert json.loads(result["metrics"][-1])["step"] == 8
    # Terminal and webhook, which need no disk, have the alarms.
    alarms = [alarm["alarm"] for alarm in hook.alarms]
    assert any(CHECKPOINT in text and "Training continues; free disk space" in text for text in alarms)
    assert "ALARM: could not write checkpoint" in result["output"]
    assert "Traceback" not in result["output"], result["output"][-3000:]
    unwritten = [text for text in alarms if OTHER_FILE in text]
    assert unwritten and all(text.split(":")[0] in result["output"] for text in unwritten)
