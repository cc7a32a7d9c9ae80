"""Runs commands of `lab.vllm` one after the other in a process of its own, each of which a line of JSON asks for.

Not a test module. What a command prints goes to standard error; the answer is a line of JSON: exit code and output.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from typer.testing import CliRunner


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from lab.vllm.app import app
    from lab.vllm.engine import check

    from .engine_process import spare

    check()  # sets what vLLM reads when it is imported
    spare()
    for line in sys.stdin:
        result = CliRunner().invoke(app, json.loads(line))
        failed = result.exception is not None and not isinstance(result.exception, SystemExit)
        said = "".join(traceback.format_exception(result.exception)) if failed else result.output
        answers.write(json.dumps([result.exit_code, said]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
