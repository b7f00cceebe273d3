"""Files to plain data: text, tables, archives. Nothing here knows of models."""
