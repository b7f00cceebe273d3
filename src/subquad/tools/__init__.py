"""What a person runs: the commands, one folder each, and what they share."""
