"""A simulated PostgreSQL server, for a simulation that decides every delay, order and fault by itself.

`host.py` is what it needs of the simulation. `server.py` is what the simulation has of it, `database.py` what the
product has. Inside, `driver.py` (in psycopg's place) sends statements to `backend.py` (transactions), which takes them
apart (`parsing.py`), waits for locks (`locks.py`) and executes them (`storage.py`, SQLite in memory).
"""
