"""`understudy certify`: an agent's run, killed at every point. No Ray."""
