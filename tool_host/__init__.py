"""The process on a node that holds what tools keep beyond a call: MCP servers. No Ray."""
