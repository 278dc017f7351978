# Sourced by the launch forms. ranks_here NODES CONFIG [key=value ...] checks the configuration and prints how many
# ranks each node runs; for a mistake it prints one line and fails, before any rank is started.
ranks_here() {
    .venv/bin/python -W ignore - "$@" <<'PYTHON'
import sys

from megarl.config import ConfigError, load_config
from megarl.dry_run import validate

nodes = int(sys.argv[1])
try:
    config = load_config(sys.argv[2], sys.argv[3:])
    if config.parallel.world_size % nodes:
        raise ConfigError(f"parallel.world_size={config.parallel.world_size} does not divide by {nodes} nodes")
    validate(config).raise_errors()
except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
print(config.parallel.world_size // nodes)
PYTHON
}
