# Sourced by the launch scripts. `ranks_here NODES CONFIG [key=value ...]` validates the configuration and prints the
# number of ranks per node. A configuration error is one line and a failure, before any rank starts.
[ -x .venv/bin/python ] || { echo "error: there is no .venv in $PWD: run bash launch/install.sh first" >&2 && exit 2; }
ranks_here() {
    .venv/bin/python -W ignore - "$@" <<'PYTHON'
import os
import sys

from megarl.launch import exit_status as ending
from megarl.config import ConfigError, load_config
from megarl.dry_run.auto_layout import with_job_size
from megarl.dry_run.validation import validate
from megarl.launch.nodes import SPARES_ENV, parse_spares
from megarl.parallel.rendezvous import check_rendezvous

try:
    nodes = sys.argv[1]
    if not nodes.isdecimal() or int(nodes) < 1:
        raise ConfigError(f"NNODES={nodes} must be the number of nodes, at least 1")
    spares = parse_spares(os.environ.get(SPARES_ENV, ""))
    if "NODE_RANK" in os.environ:
        check_rendezvous(int(nodes) + spares, os.environ["NODE_RANK"], os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    config = with_job_size(load_config(sys.argv[2], sys.argv[3:]), int(nodes))
    if config.parallel.world_size % int(nodes):
        raise ConfigError(f"parallel.world_size={config.parallel.world_size} does not divide by {nodes} nodes")
    validate(config).raise_errors()
except Exception as error:
    sys.exit(ending.report_error(error))
print(config.parallel.world_size // int(nodes))
PYTHON
}
