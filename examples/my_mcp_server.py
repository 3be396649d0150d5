"""An MCP server, written with the official package (pip install 'torchrl_grpo[mcp]').

python sota/grpo/grpo.py --config-name grpo_arithmetic env.max_turns=2 \\
    'env.tools=["mcp:python examples/my_mcp_server.py"]'
"""

from mcp.server import MCPServer

server = MCPServer("arithmetic")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


if __name__ == "__main__":
    server.run()  # or server.run("streamable-http", port=8000)
