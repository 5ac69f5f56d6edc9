"""The node service: all writes of a node, its frames and its queue, what clients follow, what is measured. No Ray."""
