"""Calls between processes of a machine, and what each of them needs for that. No Ray."""
