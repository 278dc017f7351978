"""Show the timeline of a run in the terminal: .venv/bin/python tools/timeline.py RUN"""

import sys

from megarl.view.run_timeline import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
