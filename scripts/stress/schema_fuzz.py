"""Runs schemathesis against the /openapi.json of a local server: what the schema promises must hold.

    pip install schemathesis
    python scripts/stress/schema_fuzz.py http://127.0.0.1:8000 [--examples 200] [--seed 0] [--api-key KEY]

Every operation is called with bodies made from the schema (coverage of each keyword's bounds, then random ones, valid
and invalid, then sequences of calls), and each answer is checked: no 5xx, a documented status, content type and shape,
and no invalid body accepted. Exit status 1 when a check failed, with a curl command for each failure; 2 when it could
not run. schemathesis is needed by nothing else, so the package does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from wire import Target, UsageError, exchange

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


def command(program: str, target: Target, examples: int, seed: int, report: Path | None) -> list[str]:
    """The command line of schemathesis."""
    words = [program, "run", f"{target.url}/openapi.json", "--url", target.url, "--seed", str(seed)]
    words += ["--max-examples", str(examples), "--checks", ",".join(CHECKS), "--request-timeout", "60"]
    words += ["--continue-on-failure", "--workers", "1", "--generation-deterministic"]
    words += ["--header", f"Authorization: Bearer {target.key}"] if target.key else []
    return words + (["--report-junit-path", str(report)] if report else [])


def check_schema(target: Target) -> int:
    """The number of operations in the server's schema. Raises UsageError when there is none."""
    answer = exchange(target, target.get("/openapi.json"), timeout=30)
    if answer.status != 200:
        raise UsageError(f"the server has no /openapi.json ({answer}); turn it on in the server's settings")
    operations = sum(len(path) for path in json.loads(answer.body).get("paths", {}).values())
    if not operations:
        raise UsageError("/openapi.json describes no operation")
    return operations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of the server, on this machine")
    parser.add_argument("--examples", type=int, default=200, help="random bodies per operation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit of the whole run")
    parser.add_argument("--report", type=Path, help="JUnit XML of the results")
    options = parser.parse_args()
    try:
        here = Path(sys.executable).with_name("schemathesis")
        program = str(here) if here.exists() else shutil.which("schemathesis")
        if program is None:
            raise UsageError("schemathesis is not installed; install it with `pip install schemathesis`")
        target = Target.at(options.url, options.api_key)
        print(f"{check_schema(target)} operations", flush=True)
        words = command(program, target, options.examples, options.seed, options.report)
        status = subprocess.run(words, check=False, timeout=options.seconds).returncode
        answer = exchange(target, target.get("/health?deep=1"), timeout=30)
        if answer.status != 200:
            print(f"FAILED: the server no longer answers: {answer}")
            return 1
        return status
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.TimeoutExpired:
        print(f"error: schemathesis did not end within --seconds {options.seconds:g}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
