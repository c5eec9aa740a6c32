"""The verdict table: rows, files, terminal, export of lists."""
