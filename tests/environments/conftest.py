"""What these tests name as a user would is found here: environments, servers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "sandbox"))  # whether there can be boxes
