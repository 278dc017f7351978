"""One rank of the training program, for `RankJobs.run`: argv as for `python -m megarl.train`."""

import sys

from megarl import train
from megarl.launch import exit_status

if __name__ == "__main__":
    exit_status.catch_signals()
    sys.exit(train.main())
