"""The job "survey a directory": what `make demo` shows. Written with what any user has."""
