"""Plan memory, as `megarl plan` does: .venv/bin/python tools/plan_memory.py --model NAME --gpus N"""

import sys

from megarl.dry_run.plan_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
