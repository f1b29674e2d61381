"""Makes random weights predictable in workers: Python runs this file as a process starts, if it is on PYTHONPATH."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from predictable import make_predictable

make_predictable()
