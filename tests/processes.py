"""What a Python process that a test starts imports from."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
"""The repository first, then what this process was given: packages may lie there."""
