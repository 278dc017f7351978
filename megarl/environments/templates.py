"""`${NAME}` and `${NAME:-default}` in files that others read, too: of MCP's clients, of Harbor."""

from __future__ import annotations

import os
import re

from megarl.strict import ConfigError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def filled(text: str, where: str) -> str:
    """`text` with each name replaced. Raises ConfigError, saying where it stands, for one that is not set: processes
    of environments have of the run's environment what `rollout.pass_env` lists."""

    def value(found: re.Match[str]) -> str:
        name, default = found.groups()
        if name not in os.environ and default is None:
            raise ConfigError(f"{where}: ${{{name}}} is not set; name it in rollout.pass_env and set it for the run")
        return os.environ.get(name, default or "")

    return _VARIABLE.sub(value, text)
