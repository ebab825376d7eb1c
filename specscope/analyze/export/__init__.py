"""Records as Parquet tables, for pandas and SQL."""
