"""The job "survey a directory": what `make demo` shows. Written with what any user has.

A lead agent, and a sub-agent for each part of the directory, count files, definitions and open tasks with tools of
their own (`tools`, `rules`), and merge one `report`. `job` is the driver: it spawns, kills session actors if asked, and
says what that cost. `policy` is what the offline model says in the agents' place. As a command:

    python -m understudy.examples.survey DIRECTORY --chaos 3 --verify
    python -m understudy.examples.survey DIRECTORY --session survey-1 --json
"""
