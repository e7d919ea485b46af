"""The shared memory that holds the rows."""
