"""An MCP server, written with the official package: ``python -m tests.support.mcp_server [PORT]``
serves HTTP at a port, or else standard input and output.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from PIL import Image as Picture

server = MCPServer("tests", log_level="ERROR")
_calls: list[int] = []


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def lines(texts: list[str]) -> list[str]:
    """Returns texts."""
    return texts


@server.tool(structured_output=False)
def picture(color: str) -> list[str | Image]:
    """Draws a square."""
    file = io.BytesIO()
    Picture.new("RGB", (4, 3), color).save(file, "PNG")
    return ["A square:", Image(data=file.getvalue(), format="png")]


@server.tool()
def count() -> int:
    """Counts the calls of this server."""
    _calls.append(1)
    return len(_calls)


@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ValueError(why)


@server.tool()
def wait(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "waited"


@server.tool()
def die() -> str:
    """Ends the server."""
    sys.stderr.write("the server is out of paper\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool()
def leave() -> int:
    """Starts a process that detaches itself."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
