"""What importing one of the types imports with it."""

from __future__ import annotations

import subprocess
import sys


def test_types_of_the_step_path_import_no_profiling() -> None:
    code = (
        "import sys; from engine.core.types import Output, Request, SamplingParams, Step, StepResult\n"
        "print([name for name in sys.modules if name.startswith('engine.core.profiling')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
