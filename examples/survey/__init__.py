"""The job "survey a directory": what `understudy run` shows. Written with what any user has."""
