"""What a transaction does: each function is one operation, or a part of one."""
