"""Program of a ``Session``: runs one piece of code after another in one scope, as a notebook does.

The package does not import this file. Each line of its standard input is a piece of code as JSON;
each line of its standard output is the code's output as JSON.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import json
import os
import sys
import traceback
from typing import Any

_MAX_CHARACTERS = 2**16
"""Maximum length of the output of one piece of code."""


def run(code: str, scope: dict[str, Any]) -> str:
    """Run a piece of code; return its output, followed by the value of a final expression, or its
    error.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            tree = ast.parse(code)
            last: Any = None
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                last = tree.body.pop()
            exec(compile(tree, "<code>", "exec", dont_inherit=True), scope)
            if last is not None:
                last = ast.Expression(last.value)
                value = eval(compile(last, "<code>", "eval", dont_inherit=True), scope)
                if value is not None:
                    print(repr(value))
        except SystemExit as end:
            print(f"SystemExit: {end.code}")
        except BaseException:
            kind, error, trace = sys.exc_info()
            lines = traceback.format_exception(kind, error, trace and trace.tb_next)
            print("".join(lines).rstrip())
    return printed.getvalue()[:_MAX_CHARACTERS]


def main() -> None:
    """Answer until standard input ends."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line), vars(module))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
