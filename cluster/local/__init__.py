"""The cluster's API in one process. No Ray."""
