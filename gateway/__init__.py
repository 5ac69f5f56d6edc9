"""The gateway: all model calls of a node go through here. No Ray, no store."""
