"""An MCP server, written with the official package (pip install 'torchrl_grpo[mcp]').

python sota/grpo/grpo.py --config-name grpo_arithmetic model.name=tool_starter env.difficulty=4 \\
    'env.tools=["mcp:python examples/my_mcp_server.py"]' env.max_turns=2 \\
    inference_model.max_new_tokens=96 inference_model.temperature=0.5
"""

import re

from mcp.server import MCPServer

server = MCPServer("arithmetic")


@server.tool()
def calculator(expression: str) -> int:
    """Add and subtract, as in "123+456-7"."""
    return sum(map(int, re.findall(r"[+-]?\d+", expression)))


if __name__ == "__main__":
    server.run()  # or server.run("streamable-http", port=8000)
