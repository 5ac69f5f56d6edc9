"""The session: its loop, tools and window. Plain async classes without Ray, light enough for a session actor."""
