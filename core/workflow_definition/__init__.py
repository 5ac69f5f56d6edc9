"""Workflows as data (`docs/workflow-files.md`): what a definition is, how it is read and checked, and its builder.

Pure, but for reading texts. A session actor imports these modules, which load no heavy package before they need one.
"""
