"""Facts about people, places and things, with what is and what was."""
