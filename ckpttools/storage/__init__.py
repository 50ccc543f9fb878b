"""The only package that opens files and knows of fsspec: `source` reads, `target` writes."""
