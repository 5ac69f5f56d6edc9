"""The edge to Ray: the only modules that import it."""
