"""Program of a ``Session``: runs one piece of code after another in one scope, as a notebook does.

Nothing of the package imports this file. Each line of its standard input is a piece of code as
JSON, each line of its standard output what that printed, likewise.
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

_LARGEST = 2**16
"""Characters of what one piece of code may say."""


def run(code: str, scope: dict[str, Any]) -> str:
    """Run a piece of code: what it prints, and the value of an expression at its end or the error
    that it raised.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            tree = ast.parse(code)
            last: Any = (
                tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            )
            exec(compile(tree, "<code>", "exec", dont_inherit=True), scope)
            if last is not None:
                expression = compile(
                    ast.Expression(last.value), "<code>", "eval", dont_inherit=True
                )
                value = eval(expression, scope)
                if value is not None:
                    print(repr(value))
        except SystemExit as end:
            print(f"SystemExit: {end.code}")
        except BaseException:
            kind, error, trace = sys.exc_info()
            print(
                "".join(traceback.format_exception(kind, error, trace and trace.tb_next)).rstrip()
            )
    return printed.getvalue()[:_LARGEST]


def main() -> None:
    """Answer until the standard input ends."""
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
