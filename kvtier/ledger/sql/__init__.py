"""One SQLite file: its tables and their migrations, transactions, checksums of rows."""
