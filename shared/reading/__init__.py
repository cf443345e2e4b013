"""Reading what strangers have written: bytes to text, text in parts, and processes that a hostile file may kill."""
