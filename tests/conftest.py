"""Shared by all tests."""

from hypothesis import settings

# No deadline: examples share two cores with Ray and PostgreSQL, so a slow one says nothing about the code.
settings.register_profile("understudy", max_examples=50, deadline=None)
settings.load_profile("understudy")
