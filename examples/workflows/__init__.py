"""Workflows to read and to run: `understudy workflow run understudy.examples.workflows.NAME:FUNCTION`."""
