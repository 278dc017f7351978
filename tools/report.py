"""Summarise runs, as `megarl report` does: .venv/bin/python tools/report.py RUN"""

import sys

from megarl.observe.run_report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
