"""Ask a real server of a tiny model what its /openapi.json allows, and what it forbids, by schemathesis.

    python studies/fuzz_server.py --examples 200
    python studies/fuzz_server.py --seed 7        # the same requests again

No answer may be a failure of the server, every status must be documented, and every answer must have the fields that the
document names. What a schema cannot say may still be refused, such as settings that contradict each other. Outputs are cut
to a few tokens. tests/unit/serve/test_document.py does this with few examples.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import schemathesis

from real_server import RealServer

MOST_TOKENS = 8  # of an output
LENGTHS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Ask for few tokens, unless the length is what is wrong with a request."""
    if isinstance(case.body, dict):
        for name in LENGTHS.get(case.path, ()):
            given = case.body.get(name)
            if given is None or (type(given) is int and given > MOST_TOKENS):
                case.body[name] = MOST_TOKENS


def asked(server: RealServer, examples: int, seed: int) -> tuple[bool, str]:
    """Ask a server. Return whether all answers were as documented, and what schemathesis wrote."""
    address = "http://{}:{}/openapi.json".format(*server.address)
    options = ["--max-examples", str(examples), "--seed", str(seed), "--phases", "coverage,fuzzing", "--no-color"]
    options += ["--exclude-checks", "positive_data_acceptance", "--suppress-health-check", "filter_too_much"]
    options += ["--continue-on-failure", "--request-timeout", "30"]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": Path(__file__).stem, "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory() as folder:  # schemathesis keeps notes where it runs
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", address, *options]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask a server what its /openapi.json allows, and what it forbids.")
    parser.add_argument("--examples", type=int, default=100, help="requests of each kind to each endpoint")
    parser.add_argument("--seed", type=int, default=secrets.randbits(16), help="the same seed makes the same requests")
    given = parser.parse_args()
    from serve_faults import model_folder  # noqa: PLC0415  imports torch, which schemathesis' process does not need

    with tempfile.TemporaryDirectory() as folder, RealServer(model_folder(Path(folder))) as server:
        good, written = asked(server, given.examples, given.seed)
        print(written)
        traces = server.wrote("Traceback")
        print(f"seed {given.seed}; the server wrote {'' if traces else 'no '}traceback")
    return 0 if good and not traces else 1


if __name__ == "__main__":
    sys.exit(main())
