"""The job "mend a repository": a coding agent finds out why tests fail, and mends the code in a sandbox."""
