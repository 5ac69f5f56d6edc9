"""Loops to read and to run: see `nightly.py`."""
