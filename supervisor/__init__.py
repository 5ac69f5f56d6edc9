"""Supervision as plain data and pure decisions: restarts, paging, the size of the pool. No Ray here."""
