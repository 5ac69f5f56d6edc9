"""The database: engine, tables, migrations, and how statements are run."""
