"""View runs in a browser, as `megarl view` does: .venv/bin/python tools/view.py RUN"""

import sys

from megarl.view.view_runs import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
