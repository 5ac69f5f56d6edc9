"""Tests, by what they need: `unit` nothing, `store` a database, `kernel` node services and session actors in one
process, `processes` real ones, `cluster` a Ray cluster, `deploy` what runs us. `simulation` decides every delay and
death.
"""
