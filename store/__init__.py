"""The store: tables, the transaction that applies operations, and the queries. SQLite and PostgreSQL, one code."""
