"""Files that hold many images, or say things of them: tables, Parquet, tars, trees of folders."""
