"""Make the environments and servers of this folder importable by the names that tests configure."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "sandbox"))  # for `sync_sandbox`
