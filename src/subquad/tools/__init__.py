"""The command line's side: the commands, one folder each, and what they share."""
